"""Decode with main KV in a region of kvd says what decode with all KV on the device says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, Final, TypeAlias, cast

import pytest

from tests.vllm import models
from tests.vllm.engines import Answer, Engine, abort_at_each_step, assert_same, prompt
from tests.vllm.sparse_node import BLOCK, HOW, SPARSE, TOPK, SparseNode, told, worker_of
from tests.vllm.test_offload_requests import count_calls

NEW_TOKENS: Final = 12
Stock: TypeAlias = tuple[list[Answer], list[Answer]]
"""Answers to `asked`, and to `some`."""
LENGTHS: Final = tuple(
    sorted({1, 2, 600, *(edge + by for edge in (TOPK, BLOCK, 2 * BLOCK) for by in (-1, 0, 1))})
)


def asked() -> list[list[int]]:
    """Requests at the edges of selection, block and hot buffer, and of several chunks."""
    return [prompt(200 + length, length) for length in LENGTHS]


def some() -> list[list[int]]:
    """Three requests that decode together."""
    return [prompt(37, 600), prompt(38, 333), prompt(39, 90)]


@pytest.fixture(scope="module")
def node() -> Iterator[SparseNode]:
    with SparseNode() as node:
        yield node


@pytest.fixture(scope="module")
def stock() -> Callable[[str], Stock]:
    """What a model says with all KV on the device, computed once."""

    @cache
    def said(model: str) -> Stock:
        with Engine(model, **HOW) as engine:
            return engine.generate(asked(), NEW_TOKENS), engine.generate(some(), NEW_TOKENS)

    return said


@pytest.mark.parametrize("model", SPARSE)
def test_offloaded_answers_are_the_resident_ones(
    model: str, stock: Callable[[str], Stock], node: SparseNode
) -> None:
    wanted, wanted_some = stock(model)
    with Engine(model, kv_transfer_config=node.sparse(), **HOW) as engine:
        assert engine.block_tokens == BLOCK
        assert_same(engine.generate(asked(), NEW_TOKENS), wanted)
        assert_same(engine.generate(some(), NEW_TOKENS), wanted_some)
        seen = told(node, engine)
        # Every row that was selected was one of the three, and all of them happened.
        assert seen["hot_selected"] == seen["hot_hits"] + seen["hot_misses"] + seen["hot_scratch"]
        assert min(seen["hot_hits"], seen["hot_misses"], seen["hot_evicted"]) > 0
        layers = [f"hot_{group}_hits" for group in range(6)]
        assert sum(seen[layer] for layer in layers) == seen["hot_hits"]
        # A finished request gives its hot buffer back with the next step.
        engine.generate([prompt(40, 1)], 1)
        engine.generate([prompt(41, 1)], 1)
        assert told(node, engine)["hot_free"] >= 3
        assert worker_of(engine).store.hot.check() == []


def test_size_of_hot_buffers_does_not_matter(
    stock: Callable[[str], Stock], node: SparseNode
) -> None:
    _, wanted = stock(SPARSE[0])
    transfer = node.sparse(topk_buffer_size=4 * BLOCK)
    with Engine(SPARSE[0], kv_transfer_config=transfer, **HOW) as engine:
        assert_same(engine.generate(some(), NEW_TOKENS), wanted)


def test_prefix_hits_find_their_rows_in_the_region(
    stock: Callable[[str], Stock], node: SparseNode
) -> None:
    model, (_, wanted) = SPARSE[1], stock(SPARSE[1])
    shared = some()[0][: 3 * BLOCK]
    longer = [shared + prompt(50, 77), shared + prompt(51, 200)]
    with Engine(model, **HOW) as engine:
        engine.generate(some(), NEW_TOKENS)
        wanted_longer = engine.generate(longer, NEW_TOKENS)
    with Engine(model, kv_transfer_config=node.sparse(), **HOW) as engine:
        engine.generate(some(), NEW_TOKENS)
        again = engine.generate(some(), NEW_TOKENS)
        assert [answer.num_cached for answer in again] == [4 * BLOCK, 2 * BLOCK, 0]
        assert_same(again, wanted, 4)  # hits begin other chunks
        got = engine.generate(longer, NEW_TOKENS)
        assert [answer.num_cached for answer in got] == [3 * BLOCK] * 2
        assert_same(got, wanted_longer)


def test_preempted_requests_come_back(node: SparseNode) -> None:
    long = 140
    how: dict[str, Any] = HOW | {"num_gpu_blocks_override": 12, "max_model_len": 1024}
    prompts = [prompt(47, 500), prompt(48, 300), prompt(49, 420)]
    # What is computed again goes in other chunks: both engines preempt at the same step.
    with Engine("deepseek_v32", **how) as engine:
        wanted = engine.generate(prompts, long)
    with Engine("deepseek_v32", kv_transfer_config=node.sparse(), **how) as engine:
        assert engine.num_blocks == 12
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        preempted = count_calls(scheduler, "_preempt_request")
        assert_same(engine.generate(prompts, long), wanted)
        assert preempted, "nothing was preempted: the test tests nothing"


def test_an_abort_at_any_step_gives_its_hot_buffer_back(
    stock: Callable[[str], Stock], node: SparseNode
) -> None:
    model, (_, wanted) = SPARSE[0], stock(SPARSE[0])
    with Engine(model, kv_transfer_config=node.sparse(), **HOW) as engine:
        abort_at_each_step(engine, 150, NEW_TOKENS)
        assert_same(engine.generate(some(), NEW_TOKENS), wanted)
        engine.generate([prompt(42, 200)], 1)
        seen = told(node, engine)
        assert (seen["hot_free"], seen["hot_holes"]) == (4, 0)


def plain(function: Any = None, **_: Any) -> Any:
    """A decorator of numba, which this environment has not: the function as it is."""
    return function if function is not None else plain


def test_drafts_that_are_refused_leave_nothing_behind(
    node: SparseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts by n-grams of a prompt that repeats itself: several positions a step, some void."""
    numba = SimpleNamespace(
        jit=plain,
        njit=plain,
        prange=range,
        get_num_threads=lambda: 1,
        set_num_threads=lambda _: None,
    )
    monkeypatch.setitem(sys.modules, "numba", cast("ModuleType", numba))
    again = prompt(60, 40)
    prompts = [again * 5 + prompt(61, 7) + again[:9], again * 4 + again[:20]]
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    how: dict[str, Any] = HOW | {"speculative_config": drafts}
    with Engine("deepseek_v32", **HOW) as engine:
        stock = engine.generate(prompts, 60)
    with Engine("deepseek_v32", kv_transfer_config=node.sparse(), **how) as engine:
        got = engine.generate(prompts, 60)
        seen = told(node, engine)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in stock]
    assert seen["hot_merged"] > 0, "no step verified several positions"


def test_blocks_are_capped_to_the_region_and_status_says_so(node: SparseNode) -> None:
    with Engine("deepseek_v32", kv_transfer_config=node.sparse(), **HOW) as engine:
        (seen,) = (one for one in node.engines() if one["members"])
        rows_of_block = 6 * BLOCK * 576 * 4
        assert engine.num_blocks == (1 << 27) // rows_of_block
        assert "bounded by dram_size_per_dp_GB" in seen["members"][0]["about"]["offload"]
    few = node.sparse(dram_size_per_dp_GB=1.0)
    with Engine("deepseek_v32", kv_transfer_config=few, kv_cache_memory_bytes=10 << 20) as engine:
        (seen,) = (one for one in node.engines() if one["members"])
        assert "bounded by device memory" in seen["members"][0]["about"]["offload"]
        assert engine.num_blocks * 6 * BLOCK * 132 < 10 << 20


@pytest.mark.parametrize("model", SPARSE)
def test_layers_that_share_a_selection_share_their_books(model: str, node: SparseNode) -> None:
    shared = models.model(model, index_topk_freq=3)  # indexers in layers 0, 1 and 4
    with Engine(shared, **HOW) as engine:
        wanted = engine.generate(some(), NEW_TOKENS)
    with Engine(shared, kv_transfer_config=node.sparse(), **HOW) as engine:
        assert worker_of(engine).plan.groups == ((0,), (1, 2, 3), (4, 5))
        assert_same(engine.generate(some(), NEW_TOKENS), wanted)
        assert "hot_2_hits" in (seen := told(node, engine))
        assert "hot_3_hits" not in seen
