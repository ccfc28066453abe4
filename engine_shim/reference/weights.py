"""Seeded random weights of the reference model.

Every tensor has a generator of its own, seeded by the model's seed and the tensor's name: weights
do not depend on the order they are made in, and a rank can make just the heads it owns.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine_shim.reference.config import ModelConfig


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """The lightning indexer. q is the query latent, d = index_dim, I = index_heads."""

    query: Tensor  # [q, I * d]
    query_bias: Tensor  # [I * d]
    key: Tensor  # [hidden, d]
    key_bias: Tensor  # [d]
    key_norm: Tensor  # [d]
    head: Tensor  # [hidden, I]
    head_bias: Tensor  # [I]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, all float32. H = heads of this rank, C = kv_lora_rank, r = rope_dim."""

    attention_norm: Tensor  # [hidden]
    query_down: Tensor  # [hidden, q]
    query_norm: Tensor  # [q]
    query_nope: Tensor  # [H, q, nope_dim]
    query_rope: Tensor  # [H, q, r]
    query_absorb: Tensor  # [H, nope_dim, C]: a head's key projection, folded into its query
    row_down: Tensor  # [hidden, C + r]
    row_norm: Tensor  # [C]
    value_up: Tensor  # [H, C, v_dim]
    output: Tensor  # [H, v_dim, hidden]
    mlp_norm: Tensor  # [hidden]
    mlp_gate: Tensor  # [hidden, intermediate]
    mlp_up: Tensor  # [hidden, intermediate]
    mlp_down: Tensor  # [intermediate, hidden]
    indexer: IndexerWeights | None  # None: the layer follows the indexer layer before it


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of one rank."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    unembedding: Tensor  # [hidden, vocab]


# Random queries and keys give almost equal scores, and attention would average 256 rows away.
# Scores spread this much more let a few rows decide, as in a trained model: a wrong row shows.
_QUERY_GAIN: Final = 4.0
# Consecutive queries of a trained indexer read mostly the same rows, and prefer recent ones. With
# these biases they do here: at 8 k tokens of `demo()` 6 of 10 rows are those of the query before,
# and 12 to 18 % of the rows are new to a buffer of the last 4 * index_topk ones.
_INDEX_COMMON: Final = 3.0
_INDEX_RECENT_QUERY: Final = 3.0
_INDEX_RECENT_KEY: Final = 1.0


def make_weights(config: ModelConfig, heads: slice) -> ModelWeights:
    """Make the weights of the rank that owns `heads`; everything else is the same on all ranks."""
    maker = _Maker(config.seed)
    return ModelWeights(
        embedding=maker.normal("embedding", config.vocab, config.hidden, gain=config.vocab**0.5),
        layers=tuple(
            _make_layer(maker, config, layer, heads) for layer in range(config.num_layers)
        ),
        final_norm=maker.norm("final_norm", config.hidden),
        unembedding=maker.normal("unembedding", config.hidden, config.vocab),
    )


def _make_layer(maker: _Maker, config: ModelConfig, layer: int, heads: slice) -> LayerWeights:
    def normal(name: str, *shape: int, gain: float = 1.0) -> Tensor:
        return maker.normal(f"{layer}.{name}", *shape, gain=gain)

    def norm(name: str, width: int) -> Tensor:
        return maker.norm(f"{layer}.{name}", width)

    hidden, latent, num_heads = config.hidden, config.kv_lora_rank, config.num_heads
    query, nope, wide = config.q_lora_rank, config.nope_dim, config.intermediate
    return LayerWeights(
        attention_norm=norm("attention_norm", hidden),
        query_down=normal("query_down", hidden, query),
        query_norm=norm("query_norm", query),
        query_nope=normal("query_nope", num_heads, query, nope, gain=_QUERY_GAIN)[heads],
        query_rope=normal("query_rope", num_heads, query, config.rope_dim, gain=_QUERY_GAIN)[heads],
        query_absorb=normal("query_absorb", num_heads, nope, latent)[heads],
        row_down=normal("row_down", hidden, config.row_dim),
        row_norm=norm("row_norm", latent),
        value_up=normal("value_up", num_heads, latent, config.v_dim)[heads],
        output=normal("output", num_heads, config.v_dim, hidden)[heads],
        mlp_norm=norm("mlp_norm", hidden),
        mlp_gate=normal("mlp_gate", hidden, wide),
        mlp_up=normal("mlp_up", hidden, wide),
        mlp_down=normal("mlp_down", wide, hidden),
        indexer=_make_indexer(maker, config, layer) if layer in config.index_layers else None,
    )


def _make_indexer(maker: _Maker, config: ModelConfig, layer: int) -> IndexerWeights:
    heads, half = config.index_heads, config.index_dim // 2
    # Equal rotated parts agree best at distance 0, and less with every step away from it.
    recent = torch.cat((torch.ones(half), torch.zeros(half)))
    common = maker.normal(f"{layer}.index_query_bias", 1, heads * config.index_dim)[0]
    return IndexerWeights(
        query=maker.normal(f"{layer}.index_query", config.q_lora_rank, heads * config.index_dim),
        query_bias=_INDEX_COMMON * common + _INDEX_RECENT_QUERY * recent.repeat(heads),
        key=maker.normal(f"{layer}.index_key", config.hidden, config.index_dim),
        key_norm=maker.norm(f"{layer}.index_key_norm", config.index_dim),
        key_bias=_INDEX_RECENT_KEY * recent,
        head=maker.normal(f"{layer}.index_head", config.hidden, heads),
        head_bias=torch.full((heads,), _INDEX_COMMON),
    )


class _Maker:
    """Makes named tensors from one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def normal(self, name: str, *shape: int, gain: float = 1.0) -> Tensor:
        """Return a normal tensor whose product with a unit vector has entries of size `gain`."""
        scale = gain / math.sqrt(shape[-2])
        return torch.randn(shape, generator=self._generator(name)) * scale

    def norm(self, name: str, width: int) -> Tensor:
        """Return the scale of an RMSNorm, near 1: [width]."""
        return 1.0 + 0.1 * torch.randn(width, generator=self._generator(name))

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
