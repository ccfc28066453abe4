"""Row-wise operations: RMSNorm and rotary positions."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_EPSILON: Final = 1e-6
_ROPE_BASE: Final = 10000.0


def rms_norm(rows: Tensor, scale: Tensor) -> Tensor:
    """Scale each row [..., d] to a root mean square of 1, then by scale [d]."""
    mean_square = rows.square().mean(-1, keepdim=True)
    return rows * torch.rsqrt(mean_square + _EPSILON) * scale


class Rope:
    """Rotary positions: element pairs (i, i + d/2) turn by an angle that grows with position.

    The angles come from a table made once, so a position has the same bits in every call.
    """

    def __init__(self, dim: int, max_positions: int) -> None:
        """Make the table for rotated parts of `dim` elements, even, at [0, max_positions)."""
        half = dim // 2
        frequency = _ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(max_positions, dtype=torch.float64), frequency)
        self._cos = angle.cos().float()
        self._sin = angle.sin().float()

    def __call__(self, rows: Tensor, start: int) -> Tensor:
        """Rotate rows [T, ..., dim] that stand at positions [start, start + T)."""
        half = rows.shape[-1] // 2
        shape = (rows.shape[0], *[1] * (rows.dim() - 2), half)
        cos = self._cos[start : start + rows.shape[0]].view(shape)
        sin = self._sin[start : start + rows.shape[0]].view(shape)
        left, right = rows[..., :half], rows[..., half:]
        return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)
