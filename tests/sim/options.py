"""What a seed draws: sizes, speeds and fault rates, some of them zero (swarm testing)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from kvd.core.blocks import BlockShape
from kvd.core.holds import Timing
from kvd.core.state import Limits, Settings
from tests.sim.clock import MS

SLOW_KINDS = (
    (),
    (),
    (),
    ("GrantCame",),
    ("ClaimCame", "OfferCame"),
    ("EndCame", "ReadAnswered"),
    ("OfferCame", "GrantCame", "ReadAnswered"),
    ("OfferCame", "GrantCame", "RevokeCame"),
    ("QueryCame", "GrantCame"),
    ("DeclineCame", "RevokeCame", "EndCame"),
)
"""What kvds say to each other late, together: each set delays the cure of what it delays."""


CALM: Mapping[str, Any] = MappingProxyType(
    {
        "kill_gap": 0,
        "kvd_kill_gap": 0,
        "stop_gap": 0,
        "partition_gap": 0,
        "disconnect_gap": 0,
        "renew_gap": 0,
    }
)
"""No process and no link fails as a whole."""

PROFILES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "any": {},
        # Reads that fail, are denied and begin again while blocks change hands quickly.
        "hand-off": {
            **CALM,
            "arrival": 50 * MS,
            "request_max": 8,
            "pool_blocks": 10,
            "transfer_rate": 0.95,
            "abort_rate": 0.0,
            "drop_rate": 0.0,
            "late_rate": 0.15,
            "slow_kinds": ("OfferCame", "GrantCame", "ReadAnswered"),
            "read_failure": 0.3,
            "read_time": 80 * MS,
            "compute_time": 1 * MS,
            "read_attempts": 3,
        },
        # Engines that die in the middle of their copies, and are proven dead late.
        "deaths": {
            **CALM,
            "kill_gap": 100 * MS,
            "proof_delay": 700 * MS,
            "blind_rate": 0.0,
            "copy_time": 12 * MS,
            "hang_rate": 0.1,
            "hang_time": 1500 * MS,
        },
        # Nodes whose kvd starts again and again under running engines.
        "restarts": {
            **CALM,
            "kvd_kill_gap": 400 * MS,
            "disconnect_gap": 400 * MS,
            "renew_gap": 500 * MS,
            "abort_rate": 0.0,
        },
    }
)
"""What is fixed in some worlds, so that rare chains of events are not as rare."""


@dataclass(frozen=True, slots=True)
class Options:
    """One drawn world. Times in ns, rates as probabilities, the rest are counts.

    persistent:     the pool survives its kvd.
    profile:        which of `PROFILES` overrides what was drawn.
    num_bound:      layers with a slot of their own; the others take turns in `num_rotating`.
    num_shards:     1: rank 0 saves for all ranks; 2: each rank saves and loads its own span.
    lookahead:      how many layers ahead of the computation a slot is taken and loaded.
    slow_kinds:     messages between kvds that are mostly late, whatever the link does to others.
    eager_computed: `Computed` follows `Written` without waiting for its answer.
    pipelined:      a member sends new slot events while earlier ones are not acknowledged.
    early:          a slot is taken by our own word where nobody else had a part in its last use.
    steps:          workers ask kvd to keep the blocks of whole steps, and copy without its answers.
    merges:         what went well in a tenancy is told with what was not sent of it yet.
    blind_rate:     how often the state of processes becomes unknown to a node for a while.
    """

    num_layers: int
    num_bound: int
    num_rotating: int
    block_tokens: int
    region_block_tokens: int
    chunk_max: int
    request_max: int
    pool_blocks: int
    device_blocks: int
    region_blocks: int
    tp_size: int
    num_shards: int
    num_engines: int
    num_decoders: int
    same_node: bool
    lookahead: int
    batch_max: int
    eager_computed: bool
    pipelined: bool
    arrival: int
    run: int
    tick: int
    loss: float
    duplication: float
    delay_max: int
    late_rate: float
    slow_kinds: tuple[str, ...]
    channel_loss: float
    channel_duplication: float
    channel_delay: int
    gate_delay: int
    copy_time: int
    read_time: int
    compute_time: int
    copy_failure: float
    read_failure: float
    hang_rate: float
    hang_time: int
    transfer_rate: float
    abort_rate: float
    drop_rate: float
    kill_gap: int
    kvd_kill_gap: int
    stop_gap: int
    partition_gap: int
    disconnect_gap: int
    renew_gap: int
    poison_rate: float
    short_rate: float
    blind_rate: float
    proof_delay: int
    memory_failure: float
    keep_ended: int
    transfers_max: int
    read_attempts: int
    persistent: bool
    early: bool = field(repr=False)
    steps: bool = field(repr=False)
    merges: bool = field(repr=False)
    profile: str = "any"

    @property
    def timing(self) -> Timing:
        """Deadlines in proportion to the speeds of this world."""
        return Timing(
            compute=400 * MS,
            save=250 * MS,
            offer=300 * MS,
            read=150 * MS,
            interval=40 * MS,
            query_attempts=3,
            read_attempts=self.read_attempts,
        )

    @property
    def shape(self) -> BlockShape:
        """Shape of pool blocks."""
        return BlockShape(self.block_tokens, self.num_layers, self.num_shards)

    @property
    def settings(self) -> Settings:
        """Settings of every machine."""
        limits = Limits(transfers=self.transfers_max, batch_items=64, story_entries=512)
        return Settings(
            pool_bytes=self.pool_blocks * 4096,
            region_bytes=1 << 30,
            lookup_lease=1000 * MS,
            orphan_grace=600 * MS,
            keep_ended=self.keep_ended,
            eviction="lru" if self.pool_blocks == 16 else "arc",
            high_water=1.0 if self.pool_blocks == 10 else 0.8,
            low_water=1.0 if self.pool_blocks == 10 else 0.6,
            timing=self.timing,
            limits=limits,
        )

    def lines(self) -> list[str]:
        """The options as text, a few on each line."""
        words = [f"{field.name}={_show(getattr(self, field.name))}" for field in fields(self)]
        return ["  " + "  ".join(words[at : at + 5]) for at in range(0, len(words), 5)]


def _show(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= MS:
        return f"{value / MS:g}ms"
    return str(value)


def draw(rng: random.Random) -> Options:
    """Draw a world. Every field is drawn always, so that one new option shifts no other field
    of the same draw."""
    sizes = _draw_sizes(rng)
    options = Options(
        **sizes, **_draw_paces(rng), persistent=False, early=False, steps=False, merges=False
    )
    name = rng.choice(("any", "any", "any", "hand-off", "deaths", "restarts"))
    options = replace(options, profile=name, **PROFILES[name])
    # Drawn from the world itself: past seeds go on meeting the same chances.
    late = random.Random(repr(options))
    persistent, early, steps = late.random() < 0.6, late.random() < 0.6, late.random() < 0.5
    merges = random.Random(f"merges {options!r}").random() < 0.5
    return replace(options, persistent=persistent, early=early, steps=steps, merges=merges)


def _draw_sizes(rng: random.Random) -> dict[str, Any]:
    choice = rng.choice
    tp_size = choice((1, 1, 2))
    num_shards = choice((1, 2)) if tp_size == 2 else 1
    block_tokens = choice((2, 3, 4))
    return {
        "num_layers": choice((2, 3, 4)),
        "num_bound": choice((0, 1, 1)),
        "num_rotating": choice((1, 2, 2)),
        "block_tokens": block_tokens,
        "region_block_tokens": choice((2, 3, block_tokens)),
        "chunk_max": choice((3, 6, 12)),
        "request_max": choice((5, 8, 14)),
        "pool_blocks": choice((10, 16, 30)),
        "device_blocks": 16,
        "region_blocks": choice((16, 32)),
        "tp_size": tp_size,
        "num_shards": num_shards,
        "num_engines": choice((1, 1, 2)),
        "num_decoders": choice((1, 1, 2)),
        "same_node": choice((False, False, True)),
        "lookahead": choice((0, 1, 2)),
        "batch_max": choice((1, 2)),
        "eager_computed": choice((False, True)),
        "pipelined": choice((False, True)),
    }


def _draw_paces(rng: random.Random) -> dict[str, Any]:
    choice = rng.choice
    return {
        "arrival": choice((50, 120, 240)) * MS,
        "run": choice((1000, 2500, 5000)) * MS,
        "tick": 20 * MS,
        "loss": choice((0.0, 0.0, 0.03, 0.2)),
        "duplication": choice((0.0, 0.0, 0.05, 0.3)),
        "delay_max": choice((1, 1, 5, 40, 200)) * MS,
        "late_rate": choice((0.0, 0.0, 0.15)),
        "slow_kinds": choice(SLOW_KINDS),
        "channel_loss": choice((0.0, 0.0, 0.02, 0.15)),
        "channel_duplication": choice((0.0, 0.0, 0.1)),
        "channel_delay": choice((MS // 5, MS, 8 * MS)),
        "gate_delay": choice((0, MS // 10, 10 * MS)),
        "copy_time": choice((1, 3, 12)) * MS,
        "read_time": choice((1, 10, 80)) * MS,
        "compute_time": choice((1, 2, 6)) * MS,
        "copy_failure": choice((0.0, 0.0, 0.0, 0.02, 0.1)),
        "read_failure": choice((0.0, 0.0, 0.05, 0.3)),
        "hang_rate": choice((0.0, 0.0, 0.0, 0.02, 0.1)),
        "hang_time": choice((200, 700, 1500)) * MS,
        "transfer_rate": choice((0.0, 0.5, 0.9, 0.9, 0.9)),
        "abort_rate": choice((0.0, 0.0, 0.0, 0.1, 0.3)),
        "drop_rate": choice((0.0, 0.0, 0.0, 0.1, 0.3)),
        "kill_gap": choice((0, 0, 0, 0, 100, 500)) * MS,
        "kvd_kill_gap": choice((0, 0, 0, 0, 400, 1000)) * MS,
        "stop_gap": choice((0, 0, 0, 300)) * MS,
        "partition_gap": choice((0, 0, 0, 400)) * MS,
        "disconnect_gap": choice((0, 0, 0, 400)) * MS,
        "renew_gap": choice((0, 0, 0, 0, 500)) * MS,
        "poison_rate": choice((0.0, 0.0, 0.0, 0.05)),
        "short_rate": choice((0.0, 0.0, 0.0, 0.02)),
        "blind_rate": choice((0.0, 0.0, 0.0, 0.5)),
        "proof_delay": choice((1, 50, 700)) * MS,
        "memory_failure": choice((0.0, 0.0, 0.0, 0.2)),
        "keep_ended": choice((4, 24)),
        "transfers_max": 24,
        "read_attempts": choice((1, 2, 3)),
    }
