"""Sparse decode offload with a draft layer (MTP): it has hot buffers of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from engine_shim.vllm.cpu_sparse import SparseMetadata
from engine_shim.vllm.messages import Failure
from engine_shim.vllm.sparse_rows import Share, SparseStore
from tests.vllm import models
from tests.vllm.engines import Engine, assert_same, prompt
from tests.vllm.sparse_node import BLOCK, HOW, SparseNode, told, worker_of

NEW_TOKENS: Final = 24
MODEL: Final = "deepseek_v32_mtp"
DRAFT: Final = models.NUM_LAYERS
"""The draft layer, behind the others."""


def asked() -> list[list[int]]:
    """Requests of several chunks, of one token, and at the edges of selection and block."""
    return [prompt(80, 300), prompt(81, 1), prompt(82, 63), prompt(83, BLOCK - 1)]


@pytest.fixture(scope="module")
def node() -> Iterator[SparseNode]:
    with SparseNode() as node:
        yield node


def drafting(count: int) -> dict[str, Any]:
    """Arguments of an engine that guesses so many tokens a step."""
    return HOW | {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}}


@pytest.mark.parametrize("count", [1, 3])
def test_drafts_of_a_layer_of_its_own_are_the_resident_ones(count: int, node: SparseNode) -> None:
    how = drafting(count)
    with Engine(MODEL, **how) as engine:
        wanted = engine.generate(asked(), NEW_TOKENS)
        again = engine.generate(asked(), NEW_TOKENS)
    with Engine(MODEL, kv_transfer_config=node.sparse(), **how) as engine:
        plan = worker_of(engine).plan
        assert (plan.drafts, plan.shape.width) == ((DRAFT,), 1 + count)
        assert_same(engine.generate(asked(), NEW_TOKENS), wanted)
        found = engine.generate(asked(), NEW_TOKENS)
        assert_same(found, again)
        assert [one.num_cached for one in found] == [one.num_cached for one in again]
        seen = told(node, engine)
        assert min(seen["hot_merged"], seen[f"hot_{DRAFT}_hits"]) > 0
        assert (seen["hot_holes"], seen["hot_load_failures"]) == (0, 0)


def test_steps_without_drafts_leave_rows_of_zeros(node: SparseNode) -> None:
    """A request near the longest length stops the drafts of all others until it has ended."""
    how = drafting(2) | {"max_model_len": 256}
    prompts = [prompt(84, 236), prompt(85, 70)]
    with Engine(MODEL, **how) as engine:
        wanted = engine.generate(prompts[:1], 20) + engine.generate(prompts[1:], 60)
    with Engine(MODEL, kv_transfer_config=node.sparse(), **how) as engine:
        got = both(engine, prompts, (20, 60))
        assert got == [list(one.tokens) for one in wanted]
        assert told(node, engine)["hot_holes"] == 0


def both(engine: Engine, prompts: list[list[int]], counts: tuple[int, int]) -> list[list[int]]:
    """Tokens of two requests of different lengths that run at once."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in counts
    ]
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs = engine.llm.generate(asked, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_failure_in_the_draft_layer_ends_its_request(
    node: SparseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_shares, passes = SparseStore.drafts, [0]

    def failing(store: SparseStore, step: SparseMetadata, slots: Any) -> tuple[Share, ...]:
        shares = draft_shares(store, step, slots)
        passes[0] += 1
        if passes[0] == 8:
            shares[0].failure = Failure("row_missing", "test", tuple(shares[0].blocks))
        return shares

    monkeypatch.setattr(SparseStore, "drafts", failing)
    with Engine(MODEL, kv_transfer_config=node.sparse(), **drafting(1)) as engine:
        got = engine.generate([prompt(86, 90), prompt(87, 100)], NEW_TOKENS)
        assert sorted(str(one.finish) for one in got) == ["error", "length"]
