"""Sizes of the reference model, and what a row of its KV cache costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from engine_shim.reference.bytes_tokenizer import VOCAB_SIZE

SEED_MAX: Final = 2**63 - 1
SCALE_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of one reference model; equal configs give equal weights, bit for bit.

    num_layers:    layers, each with one main row per token.
    hidden:        width of the residual stream.
    num_heads:     query heads over all ranks; a power of two, so that the sum over heads is the
                   same tree of additions for every tensor-parallel size (see `attention`).
    nope_dim:      query width per head before it is absorbed into the latent space.
    v_dim:         value width per head.
    q_lora_rank:   width of the shared query latent.
    kv_lora_rank:  latent part of a main row.
    rope_dim:      rotated part of a main row.
    intermediate:  width of the SwiGLU MLP.
    index_layers:  layers with an indexer, ascending, starting with 0; the layers up to the next one
                   follow its selection.
    index_topk:    rows a query attends to at most.
    index_heads, index_dim: heads of the indexer, and width of its one key per token.
    index_fp8:     store index keys as float8 (e4m3) with one float32 scale each, not in `dtype`.
    dtype:         element type of rows in the cache; arithmetic is float32.
    vocab:         token ids; at least the bytes and the special tokens.
    seed:          seed of all weights, 0 or more.
    max_positions: longest sequence, in tokens.
    query_tile:    rows in one matrix product (see `tiles`).
    query_group:   queries whose rows are gathered at once.
    key_tile:      index keys scored in one matrix product.

    Widths are multiples of 16: each row then starts at a 64-byte boundary, and no kernel that looks
    at alignment computes one row differently from another.

    Raises: ValueError naming the field, for the first field that is wrong.
    """

    num_layers: int = 7
    hidden: int = 128
    num_heads: int = 4
    nope_dim: int = 32
    v_dim: int = 32
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    rope_dim: int = 64
    intermediate: int = 384
    index_layers: tuple[int, ...] = (0, 3)
    index_topk: int = 256
    index_heads: int = 4
    index_dim: int = 64
    index_fp8: bool = False
    dtype: torch.dtype = torch.bfloat16
    vocab: int = VOCAB_SIZE
    seed: int = 0
    max_positions: int = 32768
    query_tile: int = 32
    query_group: int = 8
    key_tile: int = 1024

    def __post_init__(self) -> None:
        """Check every field once, so that no later code has to."""
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        for name in _WIDTHS:
            if getattr(self, name) % 16:
                raise ValueError(f"{name} is {getattr(self, name)}; give a multiple of 16")
        if self.num_heads & (self.num_heads - 1):
            raise ValueError(f"num_heads is {self.num_heads}; give a power of two")
        if self.vocab < VOCAB_SIZE:
            raise ValueError(f"vocab is {self.vocab}; give {VOCAB_SIZE} or more (bytes + specials)")
        if not 0 <= self.seed <= SEED_MAX:
            raise ValueError(f"seed is {self.seed}; give 0 to {SEED_MAX}")
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype is {self.dtype}; give torch.float32 or torch.bfloat16")
        self._check_index_layers()

    def _check_index_layers(self) -> None:
        layers = self.index_layers
        if not layers or layers[0] != 0:
            raise ValueError(
                f"index_layers is {layers}; start with 0: every layer follows an indexer before it"
            )
        if list(layers) != sorted(set(layers)) or layers[-1] >= self.num_layers:
            raise ValueError(
                f"index_layers is {layers}; give ascending layers below num_layers "
                f"({self.num_layers}), each once"
            )

    @property
    def row_dim(self) -> int:
        """Elements of a main row: latent, then rotated part."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def main_row_bytes(self) -> int:
        """Bytes of one token's main row in one layer."""
        return self.row_dim * self.dtype.itemsize

    @property
    def index_row_bytes(self) -> int:
        """Bytes of one token's index key in one indexer layer."""
        return self.index_elements * self.index_storage.itemsize

    @property
    def index_storage(self) -> torch.dtype:
        """Element type of index keys as they are stored."""
        return torch.uint8 if self.index_fp8 else self.dtype

    @property
    def index_elements(self) -> int:
        """Elements of one stored index key; with `index_fp8` the scale's four bytes follow it."""
        return self.index_dim + SCALE_BYTES if self.index_fp8 else self.index_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and parts."""
        index_bytes = len(self.index_layers) * self.index_row_bytes
        return self.num_layers * self.main_row_bytes + index_bytes

    def index_layer_of(self, layer: int) -> int:
        """Return the indexer layer whose selection `layer` uses (itself, if it has an indexer)."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}; give 0 to {self.num_layers - 1}")
        return max(index for index in self.index_layers if index <= layer)


_WIDTHS: Final = (
    "hidden",
    "nope_dim",
    "v_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "rope_dim",
    "intermediate",
    "index_dim",
)
_POSITIVE: Final = (
    "num_layers",
    "num_heads",
    *_WIDTHS,
    "index_topk",
    "index_heads",
    "max_positions",
    "query_tile",
    "query_group",
    "key_tile",
)


def tiny(seed: int = 0) -> ModelConfig:
    """Return a model for unit tests: few small layers, the real 512 + 64 row, top-k of 16."""
    return ModelConfig(
        num_layers=4,
        hidden=64,
        num_heads=4,
        nope_dim=16,
        v_dim=16,
        q_lora_rank=32,
        intermediate=128,
        index_layers=(0, 2),
        index_topk=16,
        index_heads=2,
        index_dim=32,
        seed=seed,
        max_positions=1024,
        query_tile=8,
        query_group=4,
        key_tile=32,
    )


def demo(seed: int = 0) -> ModelConfig:
    """Return the model of the demo: long prompts (16 k tokens) in seconds on two cores."""
    return ModelConfig(seed=seed)
