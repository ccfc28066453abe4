"""Checks of what a launch is given: shapes, types, devices, ranges."""

from __future__ import annotations

from typing import Final

import torch

BLOCK_MIN: Final = 16
BLOCK_MAX: Final = 1 << 16


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise ValueError unless low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value} but must be {low} to {high}")


def check_power(name: str, value: int) -> None:
    """Raise ValueError unless a program can have so many lanes."""
    if not BLOCK_MIN <= value <= BLOCK_MAX or value & (value - 1):
        raise ValueError(
            f"{name} is {value} but must be a power of two, {BLOCK_MIN} to {BLOCK_MAX}"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ValueError unless a tensor is contiguous and of a shape (None: any), type and device.

    Of several types any will do.
    """
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, sizes, strict=True)
    )
    if not fits or tensor.dtype not in dtypes:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        types = " or ".join(_short(dtype) for dtype in dtypes)
        raise ValueError(
            f"{name} must be [{wanted}] of {types}, not {list(sizes)} of {_short(tensor.dtype)}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but the rest is on {device}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
