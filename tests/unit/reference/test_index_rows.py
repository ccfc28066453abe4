"""Index keys as float8 rows: what they lose, and that nothing depends on how they were computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.config import tiny
from engine_shim.reference.generate import decode, prefill
from engine_shim.reference.index_rows import read_keys, store_keys
from engine_shim.reference.model import SparseModel

CONFIG = replace(tiny(), index_fp8=True)


def keys(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, CONFIG.index_dim, generator=generator) * 5


def test_values_come_back_within_half_a_step() -> None:
    given = keys(50)
    rows = store_keys(CONFIG, given)
    assert rows.shape == (50, CONFIG.index_row_bytes)
    assert rows.dtype == torch.uint8
    found = read_keys(CONFIG, rows)
    largest = given.abs().amax(-1, keepdim=True)
    # e4m3 has three bits behind the leading one, and steps of largest / 448 / 512 near zero.
    assert bool(((found - given).abs() <= given.abs() / 16 + largest / 448 / 512).all())


def test_a_key_of_zeros_is_a_key_of_zeros() -> None:
    assert not read_keys(CONFIG, store_keys(CONFIG, torch.zeros(2, CONFIG.index_dim))).any()


def test_without_float8_keys_are_stored_in_the_model_s_dtype() -> None:
    plain = tiny()
    rows = store_keys(plain, keys(3))
    assert rows.dtype == plain.dtype
    assert torch.equal(read_keys(plain, rows), rows.float())


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_tokens_do_not_depend_on_chunks(chunk: int) -> None:
    model = SparseModel(CONFIG)
    prompt = [3 + at * 7 % 250 for at in range(64)]
    digests = []
    for size in (64, chunk):
        cache = ResidentCache(CONFIG, 80)
        prefill(model, cache, prompt, size)
        digests.append(decode(model, cache, prompt, 6).logits_digest)
    assert digests[0] == digests[1]
