"""Index keys as they are stored: in the model's dtype, or as float8 with a scale for each key.

A float8 row is [index_dim] e4m3 values, then one float32: value = e4m3 * scale. The scale is the
key's largest magnitude over 448, the largest e4m3 number.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine_shim.reference.config import ModelConfig

_FP8: Final = torch.float8_e4m3fn
_FP8_MAX: Final = 448.0
_SCALE_MIN: Final = 1e-12  # a key of zeros has a scale all the same


def store_keys(config: ModelConfig, keys: Tensor) -> Tensor:
    """Return keys [T, index_dim] float32 as rows [T, index_elements] of `index_storage`."""
    if not config.index_fp8:
        return keys.to(config.dtype)
    scale = (keys.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp(min=_SCALE_MIN)
    values = (keys / scale).to(_FP8).view(torch.uint8)
    return torch.cat((values, scale.view(torch.uint8)), -1)


def read_keys(config: ModelConfig, rows: Tensor) -> Tensor:
    """Return the keys [T, index_dim] float32 of stored rows."""
    if not config.index_fp8:
        return rows.float()
    values = rows[:, : config.index_dim].contiguous().view(_FP8).float()
    scale = rows[:, config.index_dim :].contiguous().view(torch.float32)
    return values.mul_(scale)
