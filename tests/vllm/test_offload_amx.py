"""MLA by AMX, bfloat16, in chunks: what is loaded from the pool is what a local hit would find."""

from __future__ import annotations

from typing import Final

import torch

from tests.capabilities import processor_lacks
from tests.vllm.engines import Engine, assert_same, prompt
from tests.vllm.node import Node

NEW_TOKENS: Final = 6
HOW: Final = {
    "dtype": "bfloat16",
    "max_num_batched_tokens": 256,
    "attention_config": {"backend": "AMX_MLA"},
}


def asked() -> list[list[int]]:
    """Requests of several chunks."""
    return [prompt(97, 600), prompt(98, 300)]


def test_a_pool_hit_says_what_a_local_hit_says() -> None:
    if not torch.cpu._is_amx_tile_supported():
        processor_lacks("AMX")
    with Engine("deepseek_v2", enable_prefix_caching=True, **HOW) as engine:
        stock = engine.generate(asked(), NEW_TOKENS)
        local = engine.generate(asked(), NEW_TOKENS)
    assert [answer.num_cached for answer in local] == [512, 256]
    with Node() as node, Engine("deepseek_v2", kv_transfer_config=node.rolling(3), **HOW) as engine:
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        found = engine.generate(asked(), NEW_TOKENS)
    assert [answer.num_cached for answer in found] == [512, 256]
    assert_same(found, local)
