"""Attention that begins while rows are loaded says what attention over all rows says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from engine_shim.testing import Delay, Fail, Rule
from engine_shim.vllm.sparse_rows import SparseStore
from tests.vllm import models, tamper
from tests.vllm.engines import Answer, Engine, assert_same, prompt
from tests.vllm.sparse_node import BLOCK, HOW, TOPK, SparseNode, told, worker_of

NEW_TOKENS: Final = 16
MODEL: Final = "glm_moe_dsa"
DIGITS: Final = 4
"""Of log probabilities: sums over six layers are taken in another order."""
LATE: Final = Rule(Delay(2_000_000), stream="hot", kind="copy")


def asked() -> list[list[int]]:
    """Requests at the edges of selection, block and hot buffer, and a longer one."""
    edges = (1, 2, TOPK - 1, TOPK, TOPK + 1, BLOCK - 1, BLOCK, BLOCK + 1, 600)
    return [prompt(300 + length, length) for length in edges]


@pytest.fixture(scope="module")
def node() -> Iterator[SparseNode]:
    with SparseNode() as node:
        yield node


@pytest.fixture(scope="module")
def stock() -> list[Answer]:
    with Engine(MODEL, **HOW) as engine:
        return engine.generate(asked(), NEW_TOKENS)


@pytest.mark.parametrize("late", [False, True])
def test_answers_are_the_resident_ones(
    late: bool, stock: list[Answer], node: SparseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        tamper.faulty_device(monkeypatch, [LATE])
    transfer = node.sparse(overlap_attention=True)
    with Engine(MODEL, kv_transfer_config=transfer, **HOW) as engine:
        assert_same(engine.generate(asked(), NEW_TOKENS), stock, DIGITS)
        seen = told(node, engine)
        assert seen["hot_misses"] > 0
        assert worker_of(engine).store.hot.check() == []


def test_rows_that_are_not_waited_for_would_be_seen(
    stock: list[Answer], node: SparseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper.faulty_device(monkeypatch, [Rule(Delay(20_000_000), stream="hot", kind="copy")])
    monkeypatch.setattr(SparseStore, "_decode_read", SparseStore._resident)
    transfer = node.sparse(overlap_attention=True)
    with Engine(MODEL, kv_transfer_config=transfer, **HOW) as engine:
        got = engine.generate(asked()[-1:], NEW_TOKENS)
        assert got[0].tokens != stock[-1].tokens


def test_layers_that_share_a_selection_load_together(node: SparseNode) -> None:
    shared = models.model(MODEL, index_topk_freq=3)  # indexers in layers 0, 1 and 4
    with Engine(shared, **HOW) as engine:
        wanted = engine.generate(asked()[-2:], NEW_TOKENS)
    transfer = node.sparse(overlap_attention=True)
    with Engine(shared, kv_transfer_config=transfer, **HOW) as engine:
        assert_same(engine.generate(asked()[-2:], NEW_TOKENS), wanted, DIGITS)


def test_several_positions_of_a_step_have_parts_of_their_own(node: SparseNode) -> None:
    """Drafts of a draft layer: what is late for one query is there for another.

    Sums in another order may tip a near tie, as the second prompt has one at its 32nd token: there
    stock vLLM itself says another one with drafts than without.
    """
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    how: dict[str, Any] = HOW | {"speculative_config": drafts}
    prompts = [prompt(61, 300), prompt(62, 130)]
    with Engine("deepseek_v32_mtp", **how) as engine:
        wanted = engine.generate(prompts, 30)
    transfer = node.sparse(overlap_attention=True)
    with Engine("deepseek_v32_mtp", kv_transfer_config=transfer, **how) as engine:
        got = engine.generate(prompts, 30)
        seen = told(node, engine)
    assert_same(got, wanted, DIGITS)
    assert seen["hot_merged"] > 0, "no step verified several positions"


def test_a_load_that_fails_is_an_error_of_its_request_alone(
    stock: list[Answer], node: SparseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper.faulty_device(monkeypatch, [Rule(Fail(), stream="hot", kind="copy", nth=20)])
    some = slice(-3, None)
    transfer = node.sparse(overlap_attention=True)
    with Engine(MODEL, kv_transfer_config=transfer, **HOW) as engine:
        got = engine.generate(asked()[some], NEW_TOKENS)
        failed = [at for at, answer in enumerate(got) if answer.finish == "error"]
        assert len(failed) == 1
        kept = [at for at in range(3) if at not in failed]
        assert_same([got[at] for at in kept], [stock[some][at] for at in kept], DIGITS)
        assert torch.isfinite(torch.tensor(got[failed[0]].logprobs)).all()
