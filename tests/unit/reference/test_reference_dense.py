"""The model against a naive one: no tiles, no cache, no absorption, one query at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_shim.reference.bytes_tokenizer import encode, long_text
from engine_shim.reference.config import ModelConfig, tiny
from engine_shim.reference.model import SparseModel
from tests.unit.reference.caches import RecordingCache
from tests.unit.reference.dense_reference import dense_forward

pytestmark = pytest.mark.engine

SMALL = replace(tiny(), num_layers=3, num_heads=2, index_topk=8, dtype=torch.float32)


def _compare(config: ModelConfig, num_tokens: int, tolerance: float) -> None:
    tokens = encode(long_text(num_tokens))
    cache = RecordingCache(config, num_tokens)
    logits = SparseModel(config).forward(torch.tensor(tokens), 0, cache, all_positions=True)
    expected, selections = dense_forward(config, tokens)
    for layer, chosen in selections.items():
        for position, row in enumerate(cache.announced[layer]):
            assert row[row >= 0].tolist() == chosen[position].tolist(), (layer, position)
    assert float((logits - expected).abs().max()) < tolerance


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 16, 17])
def test_logits_and_selections_match_the_naive_model(num_tokens: int) -> None:
    _compare(SMALL, num_tokens, 1e-4)


@pytest.mark.slow
def test_longer_sequences_match_the_naive_model() -> None:
    _compare(replace(SMALL, seed=3, index_layers=(0, 1)), 40, 1e-4)


@pytest.mark.slow
def test_rounded_rows_match_the_naive_model() -> None:
    _compare(replace(SMALL, dtype=torch.bfloat16), 20, 0.05)
