"""What decode selects and reads in a real engine, against numpy that shares no code with it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine_shim.vllm import sparse_math
from engine_shim.vllm.sparse_rows import LayerRows
from tests.vllm.engines import Engine, prompt
from tests.vllm.sparse_node import BLOCK, HOW, SPARSE, TOPK, SparseNode, worker_of

Array = npt.NDArray[Any]
NEW_TOKENS: Final = 8


def fp8_grid() -> Array:
    """All values of float8_e4m3fn, by their byte."""
    byte = np.arange(256)
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent, fraction = (byte >> 3) & 15, byte & 7
    small = fraction / 8 * 2.0**-6
    value = np.where(exponent == 0, small, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    return np.asarray(sign * np.where((byte & 0x7F) == 0x7F, np.nan, value))


def quantized(rows: Array) -> Array:
    """The nearest values of the grid with a power-of-two scale a row, ties to the even fraction."""
    amax = np.maximum(np.abs(rows).max(-1, keepdims=True), np.float32(1e-4))
    scale = 2.0 ** np.ceil(np.log2(amax / 448.0))
    grid = np.sort(fp8_grid()[np.isfinite(fp8_grid())])
    grid = grid[np.r_[True, np.diff(grid) > 0]]
    wanted = rows / scale
    above = np.clip(np.searchsorted(grid, wanted), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    # Of two neighbours one has an even fraction: it is the one whose half step is on the grid.
    nearer = np.where(wanted - low < high - wanted, low, high)
    tie = (wanted - low) == (high - wanted)
    even = np.where((above - 1) % 2 == 0, low, high)
    return np.asarray(np.where(tie, even, nearer) * scale)


def scores_of(queries: Array, weights: Array, keys: Array, positions: Array) -> Array:
    """The lightning indexer's scores in float64, -inf after the query."""
    heads = np.maximum(np.einsum("thd,sd->ths", quantized(queries), keys), 0)
    scores = np.einsum("ths,th->ts", heads, weights)
    return np.asarray(np.where(np.arange(len(keys)) > positions[:, None], -np.inf, scores))


@pytest.mark.parametrize("model", SPARSE)
def test_selected_rows_are_the_best_and_the_ones_that_are_read(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = {"selections": 0, "rows": 0}
    given: list[tuple[Array, ...]] = []
    index_scores, selection, read = (
        sparse_math.index_scores,
        sparse_math.selection,
        LayerRows.read,
    )

    def noted(*arrays: torch.Tensor) -> torch.Tensor:
        given.append(tuple(array.double().numpy() for array in arrays))
        return index_scores(*arrays)

    def judge(scores: torch.Tensor, num_selected: int) -> torch.Tensor:
        chosen = selection(scores, num_selected)
        wanted = scores_of(*given.pop())
        for row, (mine, its) in enumerate(zip(chosen.numpy(), wanted, strict=True)):
            picked = mine[mine >= 0]
            count = min(TOPK, int(np.isfinite(its).sum()))
            assert len(set(picked.tolist())) == count, f"query {row}"
            left = np.setdiff1d(np.flatnonzero(np.isfinite(its)), picked)
            near = 1e-4 * max(1.0, float(np.abs(its[picked]).max()))
            assert not len(left) or its[picked].min() >= its[left].max() - near
            judged["selections"] += 1
        return chosen

    def compared(
        self: LayerRows, cache: torch.Tensor, step: Any, request: int, tokens: torch.Tensor
    ) -> torch.Tensor:
        rows = read(self, cache, step, request, tokens)
        share = self._store.shares[request]
        blocks, wanted = np.array(share.blocks), tokens.numpy()
        region = self._store._region[self._layer].numpy().reshape(-1, BLOCK, rows.shape[-1])
        there = wanted >= 0
        at = region[blocks[wanted[there] // BLOCK], wanted[there] % BLOCK]
        assert np.array_equal(rows.numpy()[there], at)
        judged["rows"] += len(at)
        return rows

    monkeypatch.setattr(sparse_math, "index_scores", noted)
    monkeypatch.setattr(sparse_math, "selection", judge)
    monkeypatch.setattr(LayerRows, "read", compared)
    prompts = [prompt(90, 333), prompt(91, TOPK + 1), prompt(92, 1)]
    with SparseNode() as node, Engine(model, kv_transfer_config=node.sparse(), **HOW) as engine:
        engine.generate(prompts, NEW_TOKENS)
        assert worker_of(engine).store.hot.statistics().rows.hits > 0
    assert judged["selections"] == 6 * sum(len(one) + NEW_TOKENS - 1 for one in prompts)
    assert judged["rows"] > 0
