"""Arithmetic of DeepSeek sparse attention (DSA) in plain torch, as vLLM defines it.

Symbols: T tokens of a request in this step, S its tokens up to the last of them, H index heads,
D index head size, K selected tokens, N attention heads, L latent size, R = L + rotary size.

The *lightning indexer* gives query t and key s the score ``sum_h w[t,h] * relu(q[t,h] . k[s])``
(DeepSeek-V3.2, eq. 1); the attention then sees only the K best s <= t. q and k are rounded to fp8
with one power-of-two scale per row (vLLM's `ue8m0`), so that scores here are those of the CUDA
kernels up to the order of a sum. Nothing here looks at the other tokens of a step, so a token is
served alike in whatever chunk it comes: ties go to the earlier token, and selected tokens are taken
in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

SCALE_BYTES: Final = 4
"""A row of the index cache is D bytes of fp8, then the row's scale as a float32."""

_FP8: Final = torch.float8_e4m3fn
_FP8_MAX: Final = 448.0
_AMAX_MIN: Final = 1e-4  # of a row: keeps the scale of a row of zeros above zero


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to fp8 with a power-of-two scale each.

    Args:    rows: [..., D] of any float.
    Returns: [..., D] float8_e4m3fn and [..., 1] float32; their product is near `rows`.
    """
    values = rows.float()
    amax = values.abs().amax(-1, keepdim=True).clamp(min=_AMAX_MIN)
    scale = torch.exp2(torch.ceil(torch.log2(amax / _FP8_MAX)))
    return (values / scale).to(_FP8), scale


def write_index_keys(cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Put index keys into their rows of the index cache; a negative slot is skipped.

    Args: cache: [blocks, block tokens, D + 4] uint8, contiguous, changed.
          slots: [T] row of the cache per token, or -1.
          keys: [T, D] of any float.
    """
    width = keys.shape[-1]
    rows = cache.view(-1, width + SCALE_BYTES)
    wanted = slots >= 0
    values, scale = quantized(keys[wanted])
    new = torch.cat((values.view(torch.uint8), scale.contiguous().view(torch.uint8)), dim=-1)
    rows[slots[wanted].long()] = new


def read_index_keys(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the index keys of rows: [S] slots to [S, D] float32."""
    rows = cache.view(-1, cache.shape[-1])[slots.long()]
    values, scale = rows[:, :-SCALE_BYTES], rows[:, -SCALE_BYTES:]
    return values.contiguous().view(_FP8).float() * scale.contiguous().view(torch.float32)


def index_scores(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return how much each query wants each token.

    Args:    queries: [T, H, D] of any float, rounded to fp8 here.
             weights: [T, H] of any float.
             keys: [S, D] float32, of tokens 0 to S - 1.
             positions: [T] of the queries.
    Returns: [T, S] float32; -inf where the token comes after the query.
    """
    values, scale = quantized(queries)
    heads = torch.einsum("thd,sd->ths", values.float() * scale, keys).relu()
    scores = torch.einsum("ths,th->ts", heads, weights.float())
    later = torch.arange(keys.shape[0]) > positions.long()[:, None]
    return scores.masked_fill(later, float("-inf"))


def selection(scores: torch.Tensor, num_selected: int) -> torch.Tensor:
    """Return the best tokens of each query, in the order of their positions.

    Args:    scores: [T, S] float32, -inf for what may not be selected.
    Returns: [T, K] int32 with K = min(num_selected, S), then -1 where a query has fewer.
    """
    num_tokens = scores.shape[-1]
    order = torch.sort(scores, dim=-1, descending=True, stable=True)
    kept = order.indices[:, :num_selected]
    kept = kept.masked_fill(order.values[:, :num_selected] == float("-inf"), num_tokens)
    kept = kept.sort(dim=-1).values
    return kept.masked_fill(kept == num_tokens, -1).to(torch.int32)


def slots_of(table: torch.Tensor, positions: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Return the cache rows of a request's tokens.

    Args:    table: [blocks] block ids of the request; positions: of any shape, none negative.
    Returns: int64 in the shape of `positions`.
    """
    where = positions.long()
    return table.long()[where // block_tokens] * block_tokens + where % block_tokens


def attention(
    queries: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, scale: float, latent: int
) -> torch.Tensor:
    """Return weight-absorbed MLA over selected rows: every head sees the same key, K and V in one.

    Args:    queries: [T, N, R] of any float.
             rows: [T, K, R], a query's selected rows; its values are the first `latent` elements.
             valid: [T, K] bool; a query has at least one.
    Returns: [T, N, L] in the queries' dtype, summed in float32.
    """
    keys = rows.float()
    scores = torch.einsum("tnr,tkr->tnk", queries.float(), keys) * scale
    shares = scores.masked_fill(~valid[:, None, :], float("-inf")).softmax(-1)
    return torch.einsum("tnk,tkl->tnl", shares, keys[..., :latent]).to(queries.dtype)


def attention_in_parts(
    queries: torch.Tensor,
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    latent: int,
) -> torch.Tensor:
    """Return what `attention` does over rows that come in parts, each taken when it is needed.

    Sums are taken part by part, so that results differ by rounding, in float32. Relative to the
    largest output that is 1e-5, and 5e-7 for each unit of the largest score, at most: a score of
    300 is rounded to some 2e-5, and its share is an exponential of it.

    Args:    parts: rows [T, K, R] and which of them are a query's [T, K]; K may differ, and a query
                    may have none in some of them. What stands in rows that are not its own is
                    without consequence.
    """
    num_queries, num_heads = queries.shape[:2]
    wide = queries.float()
    peak = torch.full((num_queries, num_heads), float("-inf"))
    whole = torch.zeros(num_queries, num_heads)
    out = torch.zeros(num_queries, num_heads, latent)
    for rows, valid in parts:
        keys = rows.float().masked_fill(~valid[:, :, None], 0.0)
        scores = torch.einsum("tnr,tkr->tnk", wide, keys) * scale
        scores = scores.masked_fill(~valid[:, None, :], float("-inf"))
        higher = torch.maximum(peak, scores.amax(-1))
        # Where nothing has come yet there is nothing to scale, and -inf - -inf is no number.
        base = higher.masked_fill(higher == float("-inf"), 0.0)
        shares, kept = torch.exp(scores - base[..., None]), torch.exp(peak - base)
        whole = whole * kept + shares.sum(-1)
        out = out * kept[..., None] + torch.einsum("tnk,tkl->tnl", shares, keys[..., :latent])
        peak = higher
    return (out / whole[..., None]).to(queries.dtype)
