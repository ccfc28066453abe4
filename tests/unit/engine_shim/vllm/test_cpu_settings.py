"""Sparse models keep what they were asked for on processors whose own MLA kernel cannot do it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.vllm.v032.cpu_settings import BLOCK_TOKENS, with_own_settings


def config(*, block: int | None, **text: object) -> Any:
    """What vLLM is given."""
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**text)),
        cache_config=SimpleNamespace(
            block_size=block,
            user_specified_block_size=block is not None,
            enable_prefix_caching=True,
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=256),
    )


def without_amx(vllm_config: Any) -> None:
    """What vLLM's CPU platform makes of any MLA model there."""
    vllm_config.cache_config.block_size = 16
    vllm_config.cache_config.enable_prefix_caching = False
    vllm_config.scheduler_config.enable_chunked_prefill = False
    vllm_config.scheduler_config.max_num_batched_tokens = 2048


def settings(vllm_config: Any) -> tuple[object, ...]:
    """Block size, prefixes, chunks, tokens of a step."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    return (
        cache.block_size,
        cache.enable_prefix_caching,
        scheduler.enable_chunked_prefill,
        scheduler.max_num_batched_tokens,
    )


@pytest.mark.parametrize("block", [None, 32])
def test_a_sparse_model_keeps_them(block: int | None) -> None:
    made = config(block=block, index_topk=64)
    with_own_settings(without_amx)(object, made)
    assert settings(made) == (block or BLOCK_TOKENS, True, True, 256)


@pytest.mark.parametrize("text", [{}, {"index_topk": 64, "compress_ratios": [4]}])
def test_other_models_are_vllm_s(text: dict[str, object]) -> None:
    made = config(block=None, **text)
    with_own_settings(without_amx)(object, made)
    assert settings(made) == (16, False, False, 2048)


def test_an_engine_without_a_model_is_vllm_s() -> None:
    made = config(block=None)
    made.model_config = None
    with_own_settings(without_amx)(object, made)
    assert settings(made) == (16, False, False, 2048)
