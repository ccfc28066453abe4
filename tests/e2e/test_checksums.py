"""A byte of the pool goes wrong between save and load, in a real kvd under a real engine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from engine_shim.reference import orders as od
from engine_shim.reference.demo.processes import EngineProcess, OwnDaemon
from engine_shim.reference.layouts import block_layout
from engine_shim.reference.serve import model_config
from kvd.plan.layout import BlockLayout
from tests.e2e.pair import BLOCK, MAX_TOKENS, ORDER_SECONDS, SIZES, Pair, a_pair, resident, text
from tests.integration.held_kvd import HeldKvd

pytestmark = [pytest.mark.slow, pytest.mark.engine]

LAYOUT = BlockLayout(block_layout(model_config("tiny", 0, MAX_TOKENS), BLOCK))
LENGTH = 500
FULL_BLOCKS = (LENGTH - 1) // BLOCK


@contextmanager
def prefill_engine(mode: str) -> Iterator[tuple[OwnDaemon, EngineProcess]]:
    settings = ("pool.size=16MiB", "pool.huge_pages=off", f"pool.checksums={mode}")
    with OwnDaemon(*settings) as kvd:
        engine = EngineProcess("prefill", "prefill", "--runtime-dir", str(kvd.runtime_dir), *SIZES)
        try:
            engine.wait_ready()
            yield kvd, engine
        finally:
            engine.close()


def damage(kvd: OwnDaemon, block: int, layer: int) -> None:
    """Flip one bit of a span, behind everybody's back."""
    assert kvd.process is not None
    directory = Path(f"/proc/{kvd.process.pid}/fd")
    names = []
    for fd in directory.iterdir():
        with suppress(FileNotFoundError):  # kvd closes some meanwhile
            names += [fd] if "memfd:kvd-pool (" in os.readlink(fd) else []
    offset = block * LAYOUT.stride + LAYOUT.spans(layer)[0].offset + 17
    with names[0].open("r+b", buffering=0) as memory:
        (byte,) = os.pread(memory.fileno(), 1, offset)
        os.pwrite(memory.fileno(), bytes([byte ^ 0x10]), offset)


def prefill(engine: EngineProcess, request: str, skip: int) -> od.Prefilled:
    order = od.Prefill(request, list(text(LENGTH, skip=skip)))
    news = engine.ask(order, ORDER_SECONDS)
    assert isinstance(news, od.Prefilled), news
    return news


def mismatches(kvd: OwnDaemon) -> int:
    return int(kvd.get("/v1/status")[1]["counters"].get("checksum_mismatches", 0))


def test_a_flipped_bit_is_noticed_and_the_prompt_computed_again() -> None:
    with prefill_engine("always") as (kvd, engine):
        first = prefill(engine, "one", 0)
        assert first.hit_tokens == 0
        again = prefill(engine, "two", 0)
        assert (again.hit_tokens, again.first_token) == (FULL_BLOCKS * BLOCK, first.first_token)
        assert mismatches(kvd) == 0
        damage(kvd, block=2, layer=1)
        healed = prefill(engine, "three", 0)
        assert (healed.hit_tokens, healed.first_token) == (2 * BLOCK, first.first_token)
        assert mismatches(kvd) == 1
        _, story = kvd.get("/v1/story/block2?format=text")
        told = re.sub(" +", " ", story)
        assert re.search(r"block=2 layer=1 shard=0 expected=\w{8} got=\w{8} -> poisoned", told)
        final = prefill(engine, "four", 0)
        assert (final.hit_tokens, final.first_token) == (FULL_BLOCKS * BLOCK, first.first_token)
        assert mismatches(kvd) == 1
        assert kvd.get("/v1/status")[1]["pool"]["checksums"] == "always"


def test_sampled_notices_in_every_eighth_layer_of_a_block() -> None:
    with prefill_engine("sampled") as (kvd, engine):
        first = prefill(engine, "one", 0)
        damage(kvd, block=3, layer=1)  # not 8: has no checksum
        assert prefill(engine, "two", 0).hit_tokens == FULL_BLOCKS * BLOCK
        assert mismatches(kvd) == 0
        damage(kvd, block=3, layer=1)  # back again
        damage(kvd, block=5, layer=3)
        healed = prefill(engine, "three", 0)
        assert healed.first_token == first.first_token
        assert healed.hit_tokens < FULL_BLOCKS * BLOCK
        assert mismatches(kvd) == 1


def test_off_notices_nothing_and_says_so() -> None:
    with prefill_engine("off") as (kvd, engine):
        prefill(engine, "one", 0)
        damage(kvd, block=2, layer=1)
        assert prefill(engine, "two", 0).hit_tokens == FULL_BLOCKS * BLOCK
        assert mismatches(kvd) == 0
        assert kvd.get("/v1/status")[1]["pool"]["checksums"] == "off"


def test_a_hand_over_with_damaged_blocks_ends_with_a_code_and_the_next_one_is_right() -> None:
    with a_pair() as pair:
        tokens = text(700, skip=900)
        pair.check("before", tokens)
        damage(pair.prefill_kvd, block=1, layer=2)
        news = _hand_over(pair, "damaged", tokens)
        assert isinstance(news, od.Failed), news
        assert news.code == "checksum_mismatch"
        assert "pool block 1, layer 2: checksum" in news.detail
        pair.decode.ask(od.Drop("damaged"), ORDER_SECONDS)
        pair.check("after", tokens)
        pair.settled()
        assert mismatches(pair.prefill_kvd) == 1
        assert resident(tokens)


def _hand_over(pair: Pair, request: str, tokens: tuple[int, ...]) -> od.News:
    target = pair.expect(request, tokens)
    return pair.prefill.ask(od.Prefill(request, list(tokens), [target]), ORDER_SECONDS)


def test_damage_while_kvd_was_dead_is_noticed_by_the_first_load_after_it() -> None:
    """The checksums outlive kvd with the pool; adoption itself verifies nothing."""
    with ExitStack() as stack:
        kvd = HeldKvd("pool.size=16MiB", "pool.checksums=always")
        stack.callback(kvd.close)
        kvd.start()
        engine = EngineProcess("prefill", "prefill", "--runtime-dir", str(kvd.runtime_dir), *SIZES)
        stack.callback(engine.close)
        engine.wait_ready()
        first = prefill(engine, "one", 0)
        kvd.crash()
        kvd.start()
        again = prefill(engine, "two", 0)
        assert (again.hit_tokens, again.first_token) == (FULL_BLOCKS * BLOCK, first.first_token)
        assert mismatches(kvd) == 0
        kvd.crash()
        kvd.start()
        damage(kvd, block=4, layer=3)
        assert mismatches(kvd) == 0
        healed = prefill(engine, "three", 0)
        assert (healed.hit_tokens, healed.first_token) == (4 * BLOCK, first.first_token)
        assert mismatches(kvd) == 1
