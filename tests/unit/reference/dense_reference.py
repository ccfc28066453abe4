"""The same model once more, naively: no cache, no tiles, no absorption, one query at a time.

Shares the weights with the engine's model and nothing else. Arithmetic is float64; rows are rounded
to the config's dtype, as a cache would.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from engine_shim.reference.config import ModelConfig
from engine_shim.reference.weights import IndexerWeights, LayerWeights, make_weights

ROPE_BASE = 10000.0


def dense_forward(config: ModelConfig, tokens: list[int]) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """Return logits [T, vocab] and, per indexer layer, what each query selects, ascending."""
    weights = make_weights(config, slice(0, config.num_heads))
    hidden = weights.embedding.double()[tokens]
    selections: dict[int, list[Tensor]] = {}
    chosen: list[Tensor] = []
    for number, stored in enumerate(weights.layers):
        layer = _double(stored)
        normed = _norm(hidden, layer.attention_norm)
        if layer.indexer is not None:
            chosen = _select(config, layer, layer.indexer, normed)
            selections[number] = chosen
        hidden = hidden + _attention(config, layer, normed, chosen)
        wide = _norm(hidden, layer.mlp_norm)
        gate = wide @ layer.mlp_gate
        hidden = hidden + (gate * torch.sigmoid(gate) * (wide @ layer.mlp_up)) @ layer.mlp_down
    final = _norm(hidden, weights.final_norm.double())
    return final @ weights.unembedding.double(), selections


def _double(stored: Any) -> Any:
    """Return weights as float64."""
    parts: dict[str, Any] = {}
    for field in fields(stored):
        value = getattr(stored, field.name)
        if isinstance(value, Tensor):
            value = value.double()
        elif is_dataclass(value):
            value = _double(value)
        parts[field.name] = value
    return type(stored)(**parts)


def _norm(rows: Tensor, scale: Tensor) -> Tensor:
    return rows / torch.sqrt((rows * rows).sum(-1, keepdim=True) / rows.shape[-1] + 1e-6) * scale


def _rotate(row: Tensor, position: int) -> Tensor:
    """Rotate [..., d]: element i and element i + d/2 are one complex number."""
    half = row.shape[-1] // 2
    angle = position * ROPE_BASE ** (-torch.arange(half).double() / half)
    turned = torch.complex(row[..., :half], row[..., half:]) * torch.polar(angle * 0 + 1, angle)
    return torch.cat((turned.real, turned.imag), -1)


def _round(config: ModelConfig, row: Tensor) -> Tensor:
    return row.float().to(config.dtype).double()


def _select(
    config: ModelConfig, layer: LayerWeights, indexer: IndexerWeights, normed: Tensor
) -> list[Tensor]:
    half = config.index_dim // 2
    latent = _norm(normed @ layer.query_down, layer.query_norm)
    keys = []
    for position, row in enumerate(_norm(normed @ indexer.key, indexer.key_norm)):
        biased = row + indexer.key_bias
        turned = torch.cat((_rotate(biased[:half], position), biased[half:]))
        keys.append(_round(config, turned))
    chosen = []
    for position in range(normed.shape[0]):
        score = torch.zeros(position + 1, dtype=torch.float64)
        head_weight = normed[position] @ indexer.head + indexer.head_bias
        flat = latent[position] @ indexer.query + indexer.query_bias
        for head, query in enumerate(flat.view(config.index_heads, config.index_dim)):
            turned = torch.cat((_rotate(query[:half], position), query[half:]))
            for seen in range(position + 1):
                score[seen] += head_weight[head] * max(0.0, float(turned @ keys[seen]))
        order = sorted(range(position + 1), key=lambda seen: (-float(score[seen]), seen))
        chosen.append(torch.tensor(sorted(order[: config.index_topk])))
    return chosen


def _attention(
    config: ModelConfig, layer: LayerWeights, normed: Tensor, chosen: list[Tensor]
) -> Tensor:
    latent = _norm(normed @ layer.query_down, layer.query_norm)
    rows = []
    for position, row in enumerate(normed @ layer.row_down):
        content = _norm(row[: config.kv_lora_rank], layer.row_norm)
        turned = _rotate(row[config.kv_lora_rank :], position)
        rows.append(_round(config, torch.cat((content, turned))))
    out = torch.zeros_like(normed)
    for position, seen in enumerate(chosen):
        read = torch.stack([rows[int(where)] for where in seen])
        content, turned = read[:, : config.kv_lora_rank], read[:, config.kv_lora_rank :]
        for head in range(config.num_heads):
            key = content @ layer.query_absorb[head].T
            value = content @ layer.value_up[head]
            query = latent[position] @ layer.query_nope[head]
            query_turned = _rotate(latent[position] @ layer.query_rope[head], position)
            score = (key @ query + turned @ query_turned) / (
                config.nope_dim + config.rope_dim
            ) ** 0.5
            out[position] += score.softmax(-1) @ value @ layer.output[head]
    return out
