"""Native decode: what is refused, and copies that are late, lost, repeated or fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine_shim.device import DeviceError
from engine_shim.hot import HoleError
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.generate import decode
from engine_shim.reference.hot_cache import NativeHotCache
from engine_shim.reference.indexer import IndexQueries
from engine_shim.reference.model import SparseModel
from engine_shim.reference.native_reads import (
    NativeResidentCache,
    can_read_natively,
    step_sizes,
)
from engine_shim.testing import Delay, Fail, Late, Lose, Rule, Twice
from tests.unit.reference.cache_rig import (
    CONFIG,
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

AHEAD = "hot-ahead"


@pytest.mark.parametrize(
    ("config", "width", "message"),
    [
        (CONFIG, 15, "queries is 15; native operations take 1 to 14"),
        (CONFIG, 0, "queries is 0"),
        (replace(CONFIG, index_topk=4097), 4, "selected is 4097; native operations take 1 to 4096"),
    ],
)
def test_what_native_operations_cannot_do_is_said(
    config: ModelConfig, width: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        step_sizes(config, width=width, num_heads=None, context=100)
    assert width == 0 or not can_read_natively(config, width)
    assert can_read_natively(CONFIG, 14)


def test_calls_out_of_order_are_refused(
    model: SparseModel, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rig, prompts = make_rig(), [prompt_of(20), prompt_of(24)]
    first, second = (native(rig.open("r", len(it), truth.rows(it))) for it in prompts)
    rows = torch.zeros(2, CONFIG.row_dim, dtype=CONFIG.dtype)
    keys = torch.zeros(2, CONFIG.index_dim, dtype=CONFIG.dtype)
    queries = torch.zeros(1, CONFIG.num_heads, CONFIG.row_dim)
    with pytest.raises(ValueError, match=r"layer 0 of .* has no running step"):
        first.attend(0, queries)
    with pytest.raises(HoleError, match="position 20 is not written but 22 is"):
        first.write(0, torch.tensor([22]), rows[:1], keys[:1])
    with pytest.raises(ValueError, match="5 tokens are in one step; give 4 at most"):
        model.forward(torch.tensor(prompts[0][-5:]), 15, first)
    first.write(0, torch.tensor([20, 21]), rows, keys)
    with pytest.raises(
        ValueError, match=r"1 rows are given; give those of range\(20, 22\) at once"
    ):
        first.write(1, torch.tensor([20]), rows[:1], None)
    second.write(0, torch.tensor([24]), rows[:1], keys[:1])
    with pytest.raises(ValueError, match="another request's came between"):
        first.attend(0, queries)
    rig.store.close()
    with pytest.raises(ValueError, match="the store has no native steps"):
        first.attend(0, queries)


def test_keys_that_are_not_numbers_are_refused(
    model: SparseModel, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rig, prompt = make_rig(), prompt_of(40)
    cache = rig.open("r", 40, truth.rows(prompt))
    rig.store.index_rows(2)[:] = torch.nan
    with pytest.raises(ValueError, match="index scores of position 39 are not numbers"):
        decode(model, cache, prompt, 1)
    resident = copy.deepcopy(truth.rows(prompt))
    resident.index_keys(2, 40)[:] = torch.nan
    with pytest.raises(ValueError, match="index scores of position 39 are not numbers"):
        decode(model, NativeResidentCache(resident), prompt, 1)


def test_resident_rows_that_are_not_written_are_refused(truth: Truth) -> None:
    cache = NativeResidentCache(copy.deepcopy(truth.rows(prompt_of(20))))
    shape = (1, CONFIG.index_heads, CONFIG.index_dim)
    queries = IndexQueries(20, torch.zeros(shape), torch.zeros(shape[:2]))
    with pytest.raises(ValueError, match="layer 0: position 20 is read but only 20 positions"):
        cache.choose(0, queries)


@pytest.mark.parametrize("ordered", [True, False])
def test_slow_late_and_repeated_copies_change_nothing(
    model: SparseModel, ordered: bool, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rules = [
        Rule(Late(300_000), stream=AHEAD, kind="host", probability=0.3),
        Rule(Delay(200_000), stream=AHEAD, kind="host", probability=0.4),
        Rule(Twice(400_000), stream=AHEAD, kind="host", probability=0.5),
    ]
    prompt = prompt_of(60)
    expected = truth.decoded(prompt)
    rig = make_rig(TOPK, rules)
    cache = rig.open("r", 60, truth.rows(prompt), ordered=ordered)
    drafter = HalfRight(prompt + expected.tokens)
    got = decode(model, cache, prompt, NEW, drafter, WIDTH)
    check_same_but_for_ties(model, prompt, expected.tokens, got.tokens)
    assert not ordered or got.logits_digest == expected.logits_digest
    taken = [entry.what for entry in rig.device.journal()]
    assert min(taken.count(what) for what in ("late", "delay", "twice")) > 0


@pytest.mark.slow
def test_failed_copy_ends_the_step_and_the_next_try_is_bit_equal(
    model: SparseModel, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    prompt = prompt_of(60)
    expected = truth.decoded(prompt)
    for nth in range(0, 20, 3):
        rig = make_rig(TOPK, [Rule(Fail(), stream=AHEAD, kind="host", nth=nth)])
        cache = rig.open("r", 60, truth.rows(prompt))
        known, failures = list(prompt), 0
        while len(known) < len(prompt) + NEW:
            try:
                known += decode(model, cache, known, 1).tokens
            except DeviceError:
                failures += 1
                cache.truncate(len(known) - 1)
        assert known[len(prompt) :] == expected.tokens
        assert failures == 1
        assert rig.store.statistics().load_failures == 2, "both layers of the group"


def test_copies_without_an_end_are_waited_for_in_bounded_time(
    model: SparseModel, truth: Truth, make_rig: Callable[..., Rig]
) -> None:
    rig = make_rig(TOPK, [Rule(Lose(), stream=AHEAD, kind="host")], timeout_ns=50_000_000)
    prompt = prompt_of(60)
    cache = rig.open("r", 60, truth.rows(prompt))
    with pytest.raises(DeviceError, match="the load of layer 0 did not end in 50000000 ns"):
        decode(model, cache, prompt, NEW)
    cache.close()
    assert rig.store.statistics().parked == 1, "a copy may still run into it"


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("layer", range(CONFIG.num_layers))
@pytest.mark.parametrize("call", ["choose", "attend"])
def test_a_step_that_breaks_off_leaves_nothing_wrong(
    model: SparseModel,
    call: str,
    layer: int,
    ordered: bool,
    truth: Truth,
    make_rig: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = prompt_of(60)
    expected, rig = truth.decoded(prompt), make_rig(TOPK)
    cache = native(rig.open("r", 60, truth.rows(prompt), ordered=ordered))
    known = list(prompt)
    for step in range(6):
        if step % 2:
            with monkeypatch.context() as patched:
                patched.setattr(cache, call, _broken(getattr(cache, call), layer))
                _decode_one(model, cache, known, is_broken=not (call == "choose" and layer % 2))
        known += decode(model, cache, known, 1).tokens
    check_same_but_for_ties(model, prompt, expected.tokens[:6], known[60:])
    assert not ordered or known[60:] == expected.tokens[:6]


def _decode_one(
    model: SparseModel, cache: NativeHotCache, known: list[int], *, is_broken: bool
) -> None:
    """A step that breaks off, unless the layer is one that makes no such call."""
    if not is_broken:
        decode(model, cache, known, 1)
        return
    with pytest.raises(KeyboardInterrupt):
        decode(model, cache, known, 1)


def _broken(call: Callable[..., object], layer: int) -> Callable[..., object]:
    """A call that ends all in one layer, before it has done anything."""

    def broken(at: int, *arguments: object) -> object:
        if at == layer:
            raise KeyboardInterrupt
        return call(at, *arguments)

    return broken
