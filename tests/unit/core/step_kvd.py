"""A small kvd for stories about steps: two ranks, two layers, shards of one's own or shared."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.block_types import BlockShape
from kvd.core.blocks import BlockState
from kvd.core.ids import SlotRef
from kvd.core.state import Member
from kvd.core.use_events import Used
from tests.unit.core.tiny_kvd import DECODER, SCHEDULER, WORKERS, Kvd, hello, read_spec

LAYERS = 2
KEYS = (b"k" * 32, b"l" * 32)


class StepKvd(Kvd):
    """`Kvd` with two layers, and 8 blocks; both ranks save when their shards differ."""

    def __init__(self, num_shards: int = 1, *, both_save: bool = False, **settings: Any) -> None:
        """both_save: also where they share a shard, which no engine of ours does."""
        super().__init__(joined=False, **settings)
        layout = ev.Layout(b"layout", BlockShape(4, LAYERS, num_shards), 32, "steps")
        for ref in (SCHEDULER, *WORKERS):
            told = hello(ref)
            shard = told.rank if num_shards > 1 and told.rank > 0 else 0
            saves = told.contributes or (told.rank > 0 and (num_shards > 1 or both_save))
            joined = ev.MemberJoined(
                0, ref, 1, told.is_scheduler, told.rank, 2, shard, saves,
                4 if told.rank >= 0 else 0, layout, b"",
            )  # fmt: skip
            self.ask(joined)
        self.ask(hello(DECODER))

    def member(self, rank: int = 0) -> Member:
        return self.machine.state.members[WORKERS[rank]]

    def open(
        self,
        number: int,
        saves: tuple[se.SaveSpec, ...] = (),
        loads: tuple[se.LoadSpec, ...] = (),
        rank: int = 0,
    ) -> str:
        """Begin a step; returns the code of the answer."""
        return self.code(se.StepOpened(WORKERS[rank], number, loads, saves), rank)

    def close(self, number: int, rank: int = 0) -> None:
        assert self.code(se.StepClosed(WORKERS[rank], number), rank) == ""

    def code(
        self, event: se.SlotEvent | se.StepOpened | se.StepClosed | Used, rank: int = 0
    ) -> str:
        codes = self.say(event, rank=rank)
        return codes[0] if codes else ""

    def save_layer(self, ref: SlotRef, layer: int, blocks: tuple[int, ...], who: str) -> None:
        """Save a layer of blocks of a request, asked for by itself, and well."""
        event = se.Written(ref, layer, (spec(*blocks, who=who),))
        rank = WORKERS.index(ref.member)
        assert self.code(event, rank) == ""
        self.say(se.SaveEnded(ref, "s", True), se.Computed(ref), rank=rank)

    def fill(self, request: str, count: int = 1) -> tuple[int, ...]:
        """Blocks of a request of which every layer of shard 0 was saved; none is committed."""
        blocks = self.reserve(request, count)
        for layer in range(LAYERS):
            epoch = self.member().slots[3].ref.epoch
            self.save_layer(SlotRef(WORKERS[0], 3, epoch), layer, blocks, request)
        return blocks

    def commit(self, request: str, *blocks: int, tokens: int = 4) -> Any:
        items = [ev.CommitItem(block, KEYS[at], tokens, request) for at, block in enumerate(blocks)]
        return self.ask(ev.Committed(0, SCHEDULER, tuple(items)))

    def abort(self, request: str) -> None:
        self.ask(ev.RequestEnded(0, SCHEDULER, request, None, aborted=True))

    def state(self, block: int) -> str:
        return BlockState(self.table.state[block]).name.lower()

    def books(self, rank: int = 0) -> Any:
        """Everything that a step may change, but its number and what a refused one asked for."""
        table, member = self.table, self.member(rank)
        table.settle()
        names = (
            "free", "counts", "fills", "pins", "lives", "owned", "dead", "span_readers",
            "span_loads", "span_saves", "load_blocks", "save_blocks", "saving", "steps",
        )  # fmt: skip
        known = {name: getattr(table, name) for name in names}
        return deepcopy(
            (bytes(table.state), known, list(table.policy), member.steps,
             member.slots, member.held)
        )  # fmt: skip


def spec(*blocks: int, who: str = "r", saver: str = "s", tokens: int = 4) -> se.SaveSpec:
    return se.SaveSpec(saver, blocks, (tokens,) * len(blocks), (who,) * len(blocks))


def load(*blocks: int, who: str = "r", tokens: int = 0) -> se.LoadSpec:
    return se.LoadSpec(who, blocks, tokens or 4 * len(blocks))


def slot(epoch: int = 0, index: int = 0, rank: int = 0) -> SlotRef:
    return SlotRef(WORKERS[rank], index, epoch)


def redirect(kvd: StepKvd, blocks: tuple[int, ...]) -> list[fx.Effect]:
    """Offer layer 0 of blocks and save it; the save's end redirects the read to the pool."""
    ref = slot(index=2)
    event = se.Written(ref, 0, (spec(*blocks),), (read_spec("t", *blocks),))
    assert kvd.code(event) == ""
    kvd.say(se.SaveEnded(ref, "s", True))
    return kvd.sent
