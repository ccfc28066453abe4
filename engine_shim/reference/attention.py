"""Absorbed multi-head latent attention over selected rows.

A main row is a latent c [C] and a rotated part k [r], shared by all heads. A head's key is a
projection of c; absorbed, the projection moves to the query: score = q_latent . c + q_rope . k.
The weighted sum of the latents then goes through the head's value and output projections.

Heads are split over ranks. The score product is nevertheless always made with the rows of all
heads, those of other ranks being zero: its shape, and so its bits, do not depend on the number of
ranks. Together with the summation tree (`collective`) every rank count gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_shim.reference.collective import tree_sum
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.ops import Rope, rms_norm
from engine_shim.reference.weights import LayerWeights


def query_latent(weights: LayerWeights, hidden: Tensor) -> Tensor:
    """Return the latents [T, q_lora_rank] that the main and the index queries are made from."""
    normed = rms_norm(hidden, weights.attention_norm)
    return rms_norm(normed @ weights.query_down, weights.query_norm)


def make_rows(
    config: ModelConfig, weights: LayerWeights, rope: Rope, hidden: Tensor, start: int
) -> Tensor:
    """Return the main rows [T, C + r] of one tile of hidden rows at [start, start + T)."""
    projected = rms_norm(hidden, weights.attention_norm) @ weights.row_down
    latent, rotated = torch.split(projected, [config.kv_lora_rank, config.rope_dim], -1)
    return torch.cat((rms_norm(latent, weights.row_norm), rope(rotated, start)), -1)


def make_queries(
    config: ModelConfig, weights: LayerWeights, rope: Rope, hidden: Tensor, start: int, heads: slice
) -> Tensor:
    """Return absorbed, scaled queries [T, num_heads, C + r]; heads of other ranks are zero.

    Args: hidden: [T, hidden], one tile of rows at [start, start + T).
    """
    latent = query_latent(weights, hidden).expand(heads.stop - heads.start, -1, -1)
    absorbed = torch.bmm(torch.bmm(latent, weights.query_nope), weights.query_absorb)
    rotated = rope(torch.bmm(latent, weights.query_rope).transpose(0, 1), start)
    queries = hidden.new_zeros(hidden.shape[0], config.num_heads, config.row_dim)
    queries[:, heads, : config.kv_lora_rank] = absorbed.transpose(0, 1)
    queries[:, heads, config.kv_lora_rank :] = rotated
    return queries.mul_((config.nope_dim + config.rope_dim) ** -0.5)


def attend(config: ModelConfig, queries: Tensor, rows: Tensor, selected: Tensor) -> Tensor:
    """Return the weighted latents [Q, num_heads, C] of queries over their selected rows.

    Args: queries:  [Q, num_heads, C + r] float32.
          rows:     [Q, K, C + r] float32; anything at all where padded, which becomes 0.
          selected: [Q, K] int64, -1 where padded; at least one real position per query.
    """
    padding = selected < 0
    has_padding = bool(padding.any())
    if has_padding:
        # Weight 0 is not enough: 0 * NaN is NaN.
        rows.masked_fill_(padding.unsqueeze(-1), 0.0)
    scores = torch.bmm(queries, rows.transpose(1, 2))
    if has_padding:
        scores.masked_fill_(padding.unsqueeze(1), -torch.inf)
    return torch.bmm(scores.softmax(-1), rows[..., : config.kv_lora_rank])


def project_output(weights: LayerWeights, latents: Tensor, heads: slice) -> Tensor:
    """Return this rank's share of the attention output: [T, hidden], to be summed over ranks.

    Args: latents: [T, num_heads, C] of one tile.
    """
    values = torch.bmm(latents[:, heads].transpose(0, 1), weights.value_up)
    return tree_sum(torch.bmm(values, weights.output))
