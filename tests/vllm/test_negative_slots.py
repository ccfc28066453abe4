"""A KV write with slot -1 touches nothing, in each of vLLM's attentions for the CPU.

kvd's connector relies on it: rows that must not be written are given that slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE = 5, 16, 2, 32
LATENT, ROTARY = 512, 64
OLD = 7.0

Write = Callable[[list[int]], None]


def slots_of(numbers: list[int]) -> torch.Tensor:
    """Return a slot mapping: [T] int64."""
    return torch.tensor(numbers, dtype=torch.int64)


def dense_cache(isa: str) -> tuple[torch.Tensor, Write]:
    """Return a cache of CPU_ATTN and what writes tokens into it, with the kernels of an `isa`."""
    from vllm import _custom_ops as ops

    kv = torch.full((BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE), OLD, dtype=torch.float32)
    keys, values = kv.view(BLOCKS, HEADS, 2 * BLOCK_TOKENS, HEAD_SIZE).chunk(2, dim=2)

    def write(numbers: list[int]) -> None:
        new = torch.randn(2, len(numbers), HEADS, HEAD_SIZE)
        ops.cpu_attn_reshape_and_cache(new[0], new[1], keys, values, slots_of(numbers), isa)

    return kv, write


def latent_cache(implementation: Any, dtype: torch.dtype) -> tuple[torch.Tensor, Write]:
    """Return a cache of MLA rows and what writes tokens into it."""
    kv = torch.full((BLOCKS, BLOCK_TOKENS, LATENT + ROTARY), OLD, dtype=dtype)
    bare = implementation.__new__(implementation)

    def write(numbers: list[int]) -> None:
        latent = torch.randn(len(numbers), LATENT).to(dtype)
        rotary = torch.randn(len(numbers), 1, ROTARY).to(dtype)
        bare.do_kv_cache_update(latent, rotary, kv, slots_of(numbers), "auto", torch.ones(1))

    return kv, write


def written(kv: torch.Tensor) -> int:
    """Return how many elements of a cache were written."""
    return int((kv != OLD).sum())


def assert_skipped(kv: torch.Tensor, write: Write, row: int) -> None:
    """Assert that slots -1 change nothing, alone and between others, which are written."""
    write([-1, -1, -1])
    assert written(kv) == 0
    block = 2
    write([-1, block * BLOCK_TOKENS + 3, -1, block * BLOCK_TOKENS + 4])
    assert written(kv) == written(kv[block]) == 2 * row


@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_dense_attention_skips_negative_slots(isa: str) -> None:
    kv, write = dense_cache(isa)
    assert_skipped(kv, write, HEADS * 2 * HEAD_SIZE)


def test_plain_mla_skips_negative_slots() -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    kv, write = latent_cache(CPUMLAImpl, torch.float32)
    assert_skipped(kv, write, LATENT + ROTARY)


def test_mla_for_amx_skips_negative_slots() -> None:
    """The write needs no AMX; it has no float32."""
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl

    kv, write = latent_cache(AMXMLAImpl, torch.bfloat16)
    assert_skipped(kv, write, LATENT + ROTARY)
