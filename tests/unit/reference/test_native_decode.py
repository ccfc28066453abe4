"""Decode by native operations: each bit is that of the native resident run, and near torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine_shim.reference.attention import attend
from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.config import ModelConfig, tiny
from engine_shim.reference.drafts import PromptLookup
from engine_shim.reference.generate import decode
from engine_shim.reference.hot_cache import NativeHotCache
from engine_shim.reference.indexer import IndexQueries, select_rows
from engine_shim.reference.model import SparseModel
from engine_shim.reference.native_reads import NativeResidentCache
from kvd_kernels.rows_reference import TOLERANCE
from tests.unit.reference.cache_rig import (
    BLOCK,
    CONFIG,
    HOT,
    LENGTHS,
    NEW,
    TOPK,
    WIDTH,
    HalfRight,
    Rig,
    Truth,
    native,
    prompt_of,
)
from tests.unit.reference.ties import check_same_but_for_ties

pytestmark = pytest.mark.engine


class Beside:
    """A native resident cache whose every attention another cache does as well.

    What the model goes on with is the resident one's, so that both see the same queries.
    """

    def __init__(self, resident: Resident, other: NativeHotCache | TorchReads) -> None:
        self.resident, self.other = resident, other
        self.worst, self.num_attended = 0.0, 0

    def begin_layer(self, layer: int) -> None:
        self.other.begin_layer(layer)

    def write(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        self.resident.write(layer, positions, main, index)
        self.other.write(layer, positions, main, index)

    def end_write(self, layer: int) -> None: ...

    def choose(self, layer: int, queries: IndexQueries) -> None:
        self.resident.choose(layer, queries)
        self.other.choose(layer, queries)

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        expected = self.resident.attend(layer, queries).clone()
        found = self.other.attend(layer, queries)
        limit = float(self.resident.largest(layer))
        self.worst = max(self.worst, float((found - expected).abs().max()) / limit)
        self.num_attended += 1
        return expected

    def end_layer(self, layer: int) -> None: ...

    def truncate(self, num_tokens: int) -> None:
        self.resident.truncate(num_tokens)
        self.other.truncate(num_tokens)

    def index_keys(self, layer: int, num_tokens: int) -> Tensor:
        raise AssertionError("native reads need no copy of the keys")

    def selected(self, layer: int, positions: Tensor) -> None:
        raise AssertionError("native reads tell nobody what they selected")

    def gather(self, layer: int, selected: Tensor) -> Tensor:
        raise AssertionError("native reads need no copy of the rows")


class Resident(NativeResidentCache):
    """A native resident cache that says how large its rows are."""

    def largest(self, layer: int) -> Tensor:
        """The largest absolute value among the rows of a layer."""
        return self._main[layer].float().abs().max()


class TorchReads(ResidentCache):
    """The same reads in torch: what defines them."""

    def __init__(self, rows: ResidentCache) -> None:
        self.__dict__.update(copy.deepcopy(rows).__dict__)
        self.chosen: dict[int, Tensor] = {}

    def choose(self, layer: int, queries: IndexQueries) -> None:
        keys = self.index_keys(layer, queries.start + queries.query.shape[0])
        self.chosen[layer] = select_rows(CONFIG, queries, keys)

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        chosen = self.chosen[CONFIG.index_layer_of(layer)]
        return attend(CONFIG, queries.contiguous(), self.gather(layer, chosen).float(), chosen)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [WIDTH, TOPK, HOT, 4 * TOPK])
@pytest.mark.parametrize("width", [1, WIDTH])
def test_every_length_is_bit_equal(
    model: SparseModel, slots: int, width: int, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rig = make_rig(slots)
    for length in LENGTHS:
        prompt, name = prompt_of(length), f"length-{length}"
        expected, source = truth.decoded(prompt), truth.rows(prompt)
        drafter = HalfRight(prompt + expected.tokens) if width > 1 else None
        cache = rig.open(name, length, source)
        got = decode(model, cache, prompt, NEW, drafter, width)
        assert (got.tokens, got.logits_digest) == (expected.tokens, expected.logits_digest)
        assert width == 1 or got.num_rejected > 0
        rig.end(name, cache)
    figures = rig.store.statistics()
    assert rig.store.hot.check() == []
    assert (figures.holes, figures.load_failures, figures.parked) == (0, 0, 0)
    assert figures.rows.hits > 0
    assert (figures.rows.scratch > 0) == (slots <= TOPK or (slots == HOT and width > 1))
    merged = rig.store.figures()["hot_merged_misses"]
    assert (0 < merged <= figures.rows.merged) if width > 1 else merged == 0


@pytest.mark.parametrize("length", [1, TOPK - 1, TOPK, TOPK + 1, HOT + 1, 3 * BLOCK, 100])
@pytest.mark.parametrize("slots", [WIDTH, TOPK, HOT])
def test_overlapped_attention_is_within_its_tolerance(
    model: SparseModel, length: int, slots: int, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rig, prompt = make_rig(slots), prompt_of(length)
    expected, source = truth.decoded(prompt), truth.rows(prompt)
    cache = Beside(
        Resident(copy.deepcopy(source)), native(rig.open("r", length, source, ordered=False))
    )
    got = decode(model, cache, prompt, NEW, HalfRight(prompt + expected.tokens), WIDTH)
    assert got.logits_digest == expected.logits_digest
    assert cache.worst <= TOLERANCE
    assert cache.num_attended == CONFIG.num_layers * got.num_steps


@pytest.mark.parametrize("length", LENGTHS)
def test_overlapped_decode_gives_the_same_tokens(
    model: SparseModel, length: int, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rig, prompt = make_rig(TOPK), prompt_of(length)
    expected = truth.decoded(prompt)
    cache = rig.open("r", length, truth.rows(prompt), ordered=False)
    got = decode(model, cache, prompt, NEW, HalfRight(prompt + expected.tokens), WIDTH)
    check_same_but_for_ties(model, prompt, expected.tokens, got.tokens)


@pytest.mark.parametrize("length", LENGTHS)
def test_native_attention_is_that_of_torch_within_the_tolerance(
    model: SparseModel, length: int, truth: Truth
) -> None:
    prompt = prompt_of(length)
    source = truth.rows(prompt)
    cache = Beside(Resident(copy.deepcopy(source)), TorchReads(source))
    got = decode(model, cache, prompt, NEW, PromptLookup(), WIDTH)
    assert got.logits_digest == truth.decoded(prompt).logits_digest
    assert cache.worst <= TOLERANCE
    in_torch = decode(model, copy.deepcopy(source), prompt, NEW)
    check_same_but_for_ties(model, prompt, in_torch.tokens, got.tokens)


@pytest.mark.parametrize("width", [2, 3, WIDTH])
@pytest.mark.parametrize(
    "config",
    [
        replace(tiny(), index_fp8=True),
        replace(tiny(), dtype=torch.float32),
        replace(tiny(), index_layers=(0, 1, 3), num_heads=2, index_heads=3),
    ],
    ids=["fp8 keys", "float32", "groups of 1, 2 and 1"],
)
def test_any_kind_of_rows_is_bit_equal(
    config: ModelConfig, width: int, make_rig: Callable[..., Rig]
) -> None:
    model = SparseModel(config)
    truth, prompt = Truth(model, native=True), prompt_of(70)
    expected = truth.decoded(prompt)
    for ordered in (True, False):
        rig = make_rig(TOPK, config=config)
        cache = rig.open("r", 70, truth.rows(prompt), ordered=ordered)
        drafter = HalfRight(prompt + expected.tokens)
        got = decode(model, cache, prompt, NEW, drafter, width)
        check_same_but_for_ties(model, prompt, expected.tokens, got.tokens)
        assert not ordered or got.logits_digest == expected.logits_digest


def test_fourteen_positions_at_once_are_bit_equal(
    model: SparseModel, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rig, prompt = make_rig(HOT, width=14), prompt_of(70)
    expected = truth.decoded(prompt)
    cache = rig.open("r", 70, truth.rows(prompt))
    drafter = HalfRight(prompt + expected.tokens, wrong_each=11)
    got = decode(model, cache, prompt, NEW, drafter, 14)
    assert (got.tokens, got.logits_digest) == (expected.tokens, expected.logits_digest)
    assert got.num_steps <= 3


def test_a_rank_attends_with_its_own_heads(truth: Truth) -> None:
    prompt = prompt_of(50)
    whole = NativeResidentCache(copy.deepcopy(truth.rows(prompt)))
    half = NativeResidentCache(copy.deepcopy(truth.rows(prompt)), num_heads=2)
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(1, CONFIG.num_heads, CONFIG.row_dim, generator=generator)
    shape = (1, CONFIG.index_heads, CONFIG.index_dim)
    wanted = IndexQueries(49, torch.randn(shape, generator=generator), torch.ones(shape[:2]))
    for cache in (whole, half):
        cache.choose(0, wanted)
    for layer in (0, 1):
        all_heads = whole.attend(layer, queries)
        assert torch.equal(half.attend(layer, queries[:, 2:]), all_heads[:, 2:])


@pytest.mark.slow
def test_two_requests_take_turns_and_one_is_preempted(
    model: SparseModel, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rig = make_rig(TOPK)
    prompts = [prompt_of(40, seed=1), prompt_of(70, seed=2)]
    expected = [truth.decoded(prompt) for prompt in prompts]
    caches = [rig.open("same name", len(prompt), truth.rows(prompt)) for prompt in prompts]
    known = [list(prompt) for prompt in prompts]
    digests: list[list[str]] = [[], []]
    for step in range(NEW):
        if step == 5:
            caches[0].preempt()
            guest = rig.open("guest", 33, truth.rows(prompt_of(33)))
            decode(model, guest, prompt_of(33), 2)
            guest.close()
            caches[0].resume()
        for at, cache in enumerate(caches):
            done = decode(model, cache, known[at], 1)
            known[at] += done.tokens
            digests[at].append(done.logits_digest)
    for at, prompt in enumerate(prompts):
        assert known[at][len(prompt) :] == expected[at].tokens
        resident = NativeResidentCache(copy.deepcopy(truth.rows(prompt)))
        steps = [decode(model, resident, known[at][: len(prompt) + it], 1) for it in range(NEW)]
        assert digests[at] == [step.logits_digest for step in steps]


def test_rank_that_does_not_write_the_region(
    model: SparseModel, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rig, prompt = make_rig(TOPK), prompt_of(60)
    expected = truth.decoded(prompt).logits_digest
    cache = rig.open("r", 60, truth.rows(prompt))
    blocks = rig.blocks["r"]
    assert decode(model, cache, prompt, NEW, PromptLookup(), WIDTH).logits_digest == expected
    rig.store.close()
    rig.store = rig.make_store(TOPK, writes_region=False)
    before = rig.region.read_bytes(0, rig.region.nbytes)
    cache = rig.store.open("r", blocks)
    cache.landed(60)
    # Rows that this rank would write are another's: they must not be taken from the region.
    for layer in range(CONFIG.num_layers):
        for position in range(59, 60 + NEW):
            block, row = blocks[position // BLOCK], position % BLOCK
            rig.region.write_bytes(rig.layout.row_offset(layer, block, row), bytes(8))
    changed = rig.region.read_bytes(0, rig.region.nbytes)
    assert changed != before
    got = decode(model, cache, prompt, 1)
    assert got.tokens == truth.decoded(prompt).tokens[:1]
    assert rig.region.read_bytes(0, rig.region.nbytes) == changed


def test_tracked_rows_find_nothing_missing(
    model: SparseModel, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rig, prompt = make_rig(TOPK, track_rows=True), prompt_of(60)
    cache = rig.open("r", 60, truth.rows(prompt))
    got = decode(model, cache, prompt, NEW, PromptLookup(), WIDTH)
    assert got.logits_digest == truth.decoded(prompt).logits_digest
    assert rig.store.figures()["hot_holes"] == 0
