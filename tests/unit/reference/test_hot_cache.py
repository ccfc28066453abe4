"""Decode over hot buffers gives, bit for bit, what decode over a resident cache gives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine_shim.device import DeviceError
from engine_shim.device_memory import MemfdMemory
from engine_shim.hot import HoleError
from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.drafts import Drafter, PromptLookup
from engine_shim.reference.generate import decode
from engine_shim.reference.hot_cache import HotCache, HotStore
from engine_shim.reference.model import SparseModel
from engine_shim.testing import Delay, Fail, Late, Rule
from tests.unit.reference.cache_rig import (
    CONFIG,
    HOT,
    LENGTHS,
    NEW,
    NUM_BLOCKS,
    TOPK,
    WIDTH,
    HalfRight,
    Rig,
    Truth,
    land,
    prompt_of,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def truth(model: SparseModel) -> Truth:
    """Give what is right when rows are read in torch."""
    return Truth(model)


class Compared:
    """A hot cache that is held against a resident one at every gather."""

    def __init__(self, hot: HotCache, resident: ResidentCache) -> None:
        self.hot, self.resident = hot, resident
        self.num_gathered = 0

    def begin_layer(self, layer: int) -> None:
        self.hot.begin_layer(layer)

    def write(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        self.resident.write(layer, positions, main, index)
        self.hot.write(layer, positions, main, index)

    def end_write(self, layer: int) -> None:
        self.hot.end_write(layer)

    def index_keys(self, layer: int, num_tokens: int) -> Tensor:
        keys = self.hot.index_keys(layer, num_tokens)
        assert torch.equal(keys, self.resident.index_keys(layer, num_tokens))
        return keys

    def selected(self, layer: int, positions: Tensor) -> None:
        self.hot.selected(layer, positions)

    def gather(self, layer: int, selected: Tensor) -> Tensor:
        rows = self.hot.gather(layer, selected)
        expected = self.resident.gather(layer, selected)
        chosen = selected >= 0
        assert torch.equal(rows[chosen].view(torch.int16), expected[chosen].view(torch.int16))
        self.num_gathered += int(chosen.sum())
        return rows

    def end_layer(self, layer: int) -> None:
        self.hot.end_layer(layer)

    def truncate(self, num_tokens: int) -> None:
        self.resident.truncate(num_tokens)
        self.hot.truncate(num_tokens)


def test_store_that_cannot_be() -> None:
    rig = Rig()
    arguments = {
        "slots": HOT,
        "num_buffers": 1,
        "max_step_tokens": WIDTH,
        "index_memory": rig.index,
    }
    small = MemfdMemory(100, "small")
    other = replace(rig.layout, num_layers=rig.layout.num_layers + 1)
    for layout, changed, message in (
        (other, {}, "layout is RegionLayout"),
        (rig.layout, {"max_step_tokens": 0}, r"max_step_tokens is 0; give 1 to slots \(32\)"),
        (rig.layout, {"max_step_tokens": HOT + 1}, "max_step_tokens is 33"),
        (rig.layout, {"index_memory": small}, "index_memory has 100 bytes; give"),
        (rig.layout, {"index_memory": "memory"}, "index_memory is a str"),
    ):
        with pytest.raises(ValueError, match=message):
            HotStore(CONFIG, rig.device, rig.region.mapping, layout, **{**arguments, **changed})  # type: ignore[arg-type]
    small.close()
    rig.close()


def test_step_wider_than_allowed(model: SparseModel, truth: Truth) -> None:
    rig, prompt = Rig(), prompt_of(20)
    cache = rig.open("r", 20, truth.rows(prompt))
    before = rig.store.statistics()
    with pytest.raises(ValueError, match="5 tokens are in one step; give 4 at most"):
        model.forward(torch.tensor(prompt[-5:]), 15, cache)
    assert rig.store.statistics() == before
    rig.close()


def test_calls_that_do_not_fit(truth: Truth) -> None:
    rig, prompt = Rig(), prompt_of(20)
    cache = rig.open("r", 20, truth.rows(prompt))
    with pytest.raises(ValueError, match="layer 0: position 20 is read but only 20 positions"):
        cache.index_keys(0, 21)
    rows = torch.zeros(1, CONFIG.row_dim, dtype=CONFIG.dtype)
    keys = torch.zeros(1, CONFIG.index_dim, dtype=CONFIG.dtype)
    with pytest.raises(HoleError, match="position 20 is not written but 22 is"):
        cache.write(0, torch.tensor([22]), rows, keys)
    cache.write(0, torch.tensor([20]), rows, keys)
    cache.selected(0, torch.tensor([[3, 20, -1]]))
    with pytest.raises(ValueError, match="position 4 is gathered but was not selected"):
        cache.gather(0, torch.tensor([[3, 4, -1]]))
    assert cache.gather(0, torch.tensor([[-1, 20, -1]])).shape == (1, 3, CONFIG.row_dim)
    rig.close()


def test_closed_store() -> None:
    rig = Rig()
    rows = rig.store.hot_rows(0, 0)
    with pytest.raises(BufferError):
        rig.store.close()
    del rows
    rig.close()
    with pytest.raises(ValueError, match="the hot buffers are closed"):
        rig.store.hot_rows(0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [WIDTH, TOPK, HOT, 4 * TOPK])
@pytest.mark.parametrize("width", [1, WIDTH])
def test_every_length_is_bit_equal(
    model: SparseModel, slots: int, width: int, truth: Truth
) -> None:
    rig = Rig(slots)
    for length in LENGTHS:
        prompt = prompt_of(length)
        expected = truth.decoded(prompt)
        source = truth.rows(prompt)
        hot = rig.open(f"length-{length}", length, source)
        cache = Compared(hot, source)
        drafter = HalfRight(prompt + expected.tokens) if width > 1 else None
        got = decode(model, cache, prompt, NEW, drafter, width)
        assert (got.tokens, got.logits_digest) == (expected.tokens, expected.logits_digest)
        assert cache.num_gathered >= CONFIG.num_layers * NEW
        assert width == 1 or got.num_rejected > 0
        rig.end(f"length-{length}", hot)
    figures = rig.store.statistics()
    assert rig.store.hot.check() == []
    assert (figures.holes, figures.load_failures, figures.parked) == (0, 0, 0)
    assert figures.rows.hits > 0
    assert (figures.rows.scratch > 0) == (slots <= TOPK or (slots == HOT and width > 1))
    assert (figures.rows.merged > 0) == (width > 1)
    rig.close()


@pytest.mark.parametrize("drafter", [PromptLookup(), HalfRight([255] * 200)])
def test_drafts_that_are_mostly_wrong(model: SparseModel, drafter: Drafter, truth: Truth) -> None:
    rig, prompt = Rig(), prompt_of(12) * 4
    expected = truth.decoded(prompt)
    source = truth.rows(prompt)
    cache = Compared(rig.open("r", len(prompt), source), source)
    got = decode(model, cache, prompt, NEW, drafter, WIDTH)
    assert got.logits_digest == expected.logits_digest
    assert got.num_rejected > got.num_accepted
    rig.close()


def test_decode_from_the_first_token(model: SparseModel, truth: Truth) -> None:
    rig, prompt = Rig(), prompt_of(1)
    cache = rig.open("r", 1, None)
    got = decode(model, cache, prompt, NEW)
    assert got.logits_digest == truth.decoded(prompt).logits_digest
    rig.close()


@pytest.mark.slow
def test_two_requests_take_turns_and_one_is_preempted(model: SparseModel, truth: Truth) -> None:
    rig = Rig(TOPK)
    prompts = [prompt_of(40, seed=1), prompt_of(70, seed=2)]
    expected = [truth.decoded(prompt) for prompt in prompts]
    caches = [rig.open("same name", len(prompt), truth.rows(prompt)) for prompt in prompts]
    known = [list(prompt) for prompt in prompts]
    for step in range(NEW):
        if step == 5:
            caches[0].preempt()
            guest = rig.open("guest", 33, truth.rows(prompt_of(33)))
            decode(model, guest, prompt_of(33), 2)
            guest.close()
            caches[0].resume()
        for at, cache in enumerate(caches):
            known[at] += decode(model, cache, known[at], 1).tokens
    for at, prompt in enumerate(prompts):
        assert known[at][len(prompt) :] == expected[at].tokens
    rig.close()


def test_rank_that_does_not_write_reads_what_the_first_rank_wrote(
    model: SparseModel, truth: Truth
) -> None:
    rig, prompt = Rig(TOPK), prompt_of(50)
    first, blocks = rig.store, random.Random(3).sample(range(NUM_BLOCKS), 9)
    cache = first.open("r", blocks)
    land(cache, truth.rows(prompt), len(prompt))
    digests = [decode(model, cache, prompt, NEW, PromptLookup(), WIDTH).logits_digest]
    first.close()
    rig.store = rig.make_store(TOPK, writes_region=False)
    before = rig.region.read_bytes(0, rig.region.nbytes)
    cache = rig.store.open("r", blocks)
    cache.landed(len(prompt))
    digests.append(decode(model, cache, prompt, NEW, PromptLookup(), WIDTH).logits_digest)
    assert digests == [truth.decoded(prompt).logits_digest] * 2
    assert rig.region.read_bytes(0, rig.region.nbytes) == before
    rig.close()


def test_tracked_rows_find_nothing_missing(model: SparseModel, truth: Truth) -> None:
    rig, prompt = Rig(TOPK, track_rows=True), prompt_of(60)
    cache = rig.open("r", 60, truth.rows(prompt))
    got = decode(model, cache, prompt, NEW, PromptLookup(), WIDTH)
    assert got.logits_digest == truth.decoded(prompt).logits_digest
    assert rig.store.figures()["hot_holes"] == 0
    rig.close()


def test_slow_and_late_loads_change_nothing(model: SparseModel, truth: Truth) -> None:
    rules = [
        Rule(Late(300_000), kind="record", probability=0.3),
        Rule(Delay(200_000), kind="copy", probability=0.3),
    ]
    rig, prompt = Rig(TOPK, rules), prompt_of(60)
    cache = rig.open("r", 60, truth.rows(prompt))
    got = decode(model, cache, prompt, NEW, PromptLookup(), WIDTH)
    assert got.logits_digest == truth.decoded(prompt).logits_digest
    taken = [entry.what for entry in rig.device.journal()]
    assert taken.count("late") > 10
    assert taken.count("delay") > 10
    rig.close()


@pytest.mark.slow
def test_failed_load_ends_the_step_and_the_next_try_is_bit_equal(
    model: SparseModel, truth: Truth
) -> None:
    prompt = prompt_of(60)
    expected = truth.decoded(prompt)
    failures = 0
    for nth in range(0, 24, 3):
        rig = Rig(TOPK, [Rule(Fail(moved=0.5), kind="copy", nth=nth)])
        cache = rig.open("r", 60, truth.rows(prompt))
        known = list(prompt)
        while len(known) < len(prompt) + NEW:
            try:
                known += decode(model, cache, known, 1).tokens
            except DeviceError:
                failures += 1
                cache.truncate(len(known) - 1)
        assert known[len(prompt) :] == expected.tokens
        assert rig.store.statistics().load_failures == 1
        rig.close()
    assert failures == 8
