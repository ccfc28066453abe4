"""Prefill on a few rotating buffers says what stock vLLM says, token for token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from tests.vllm.engines import Answer, Engine, assert_same, prompt
from tests.vllm.models import NUM_LAYERS
from tests.vllm.node import Node

NEW_TOKENS: Final = 8
LENGTHS: Final = (700, 300, 130, 40)

CASES: Final[Mapping[str, tuple[str, Mapping[str, Any], tuple[int, ...]]]] = {
    "llama-chunks": ("llama", {"max_num_batched_tokens": 256}, (1, 2, 3, 4, NUM_LAYERS)),
    "llama-one-chunk": ("llama", {"max_num_batched_tokens": 2048}, (1, 3)),
    "qwen3-chunks": ("qwen3", {"max_num_batched_tokens": 256}, (2,)),
    "deepseek_v2": ("deepseek_v2", {"max_num_batched_tokens": 2048}, (1, 3, NUM_LAYERS)),
    "deepseek_v3": ("deepseek_v3", {"max_num_batched_tokens": 2048}, (2,)),
}
"""Model, how it is run, and numbers of shared buffers."""


def prompts(case: str, buffers: int) -> list[list[int]]:
    """Prompts that no other case begins with: nothing of them is in the pool before."""
    base = 100 * (1 + sorted(CASES).index(case)) + 10 * buffers
    return [prompt(base + at, length) for at, length in enumerate(LENGTHS)]


def stock_answers(name: str) -> dict[int, list[Answer]]:
    """What stock vLLM says to the prompts of a case."""
    model, how, buffers = CASES[name]
    with Engine(model, enable_prefix_caching=False, **how) as engine:
        return {count: engine.generate(prompts(name, count), NEW_TOKENS) for count in buffers}


@pytest.mark.parametrize("name", list(CASES))
def test_rolling_buffers_say_what_stock_says(name: str) -> None:
    model, how, buffers = CASES[name]
    stock = stock_answers(name)
    with Node() as node:
        for count in buffers:
            asked = prompts(name, count)
            with Engine(model, kv_transfer_config=node.rolling(count), **how) as engine:
                first = engine.generate(asked, NEW_TOKENS)
                again = engine.generate(asked, NEW_TOKENS)
                size = engine.block_tokens
            assert_same(first, stock[count])
            assert [answer.num_cached for answer in first] == [0] * len(asked)
            found = [(len(tokens) - 1) // size * size for tokens in asked]
            assert [answer.num_cached for answer in again] == found
            if not model.startswith("deepseek"):
                # With MLA a hit is computed by other kernels than a full prefill.
                assert_same(again, stock[count])
