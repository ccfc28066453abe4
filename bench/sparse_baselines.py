"""What residency is compared with: the native baselines, compiled on first use, and torch.

The compiler is the one that builds the project; `native/sparse_baselines.cpp` says what is in them.
"""

from __future__ import annotations

import ctypes
import subprocess
import weakref
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

SOURCE: Final = Path(__file__).with_name("native") / "sparse_baselines.cpp"
FLAGS: Final = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC")


class Baselines:
    """The compiled baselines."""

    def __init__(self, folder: Path) -> None:
        """Compile into a folder. Raises: CalledProcessError, FileNotFoundError without compiler."""
        built = folder / "sparse_baselines.so"
        subprocess.run(["c++", *FLAGS, str(SOURCE), "-o", str(built)], check=True, timeout=120)
        self._library = ctypes.CDLL(str(built))
        for name in ("marks_new", "scan_new", "lru_new"):
            getattr(self._library, name).restype = ctypes.c_void_p
        self._library.read_scores.restype = ctypes.c_float

    def marks(self, positions_max: int) -> ctypes.c_void_p:
        """Return what the scans of a thread share; it is never freed."""
        return ctypes.c_void_p(self._library.marks_new(positions_max))

    def scan(self, slots: int, marks: ctypes.c_void_p) -> LruScan:
        """Make a buffer whose step walks the whole list of its slots."""
        return LruScan(self._library, slots, marks)

    def lru(self, slots: int, positions_max: int) -> MissCounter:
        """Make a buffer that only counts what exact LRU misses."""
        return MissCounter(self._library, slots, positions_max)

    def read(self, scores: Floats) -> None:
        """Read scores once."""
        self._library.read_scores(address_of(scores), ctypes.c_int64(scores.size))


def address_of(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    """Return where an array is."""
    return ctypes.c_void_p(array.ctypes.data)


class LruScan:
    """A buffer whose step walks the whole list of its slots."""

    def __init__(self, library: ctypes.CDLL, slots: int, marks: ctypes.c_void_p) -> None:
        """All slots are empty."""
        self._library = library
        self._scan = ctypes.c_void_p(library.scan_new(slots, marks))
        self._delete = weakref.finalize(self, library.scan_delete, self._scan)

    def step(self, selected: ctypes.c_void_p, count: int, places: ctypes.c_void_p) -> int:
        """Place what is selected; returns the rows to load."""
        return int(self._library.scan_step(self._scan, selected, count, places))


class MissCounter:
    """A buffer that only counts what exact LRU misses."""

    def __init__(self, library: ctypes.CDLL, slots: int, positions_max: int) -> None:
        """All slots are empty."""
        self._library = library
        self._buffer = ctypes.c_void_p(library.lru_new(slots, positions_max))
        self._delete = weakref.finalize(self, library.lru_delete, self._buffer)

    def misses(self, selected: Ints) -> int:
        """Return the misses among distinct positions."""
        return int(self._library.lru_step(self._buffer, address_of(selected), len(selected)))


class TorchResidency:
    """The same books in torch operations, with a reverse index: what an engine could write."""

    def __init__(self, slots: int, context: int) -> None:
        """All slots are empty."""
        self._cache_slots = torch.full((context,), -1, dtype=torch.int32)
        self._tokens = torch.full((slots,), -1, dtype=torch.int64)
        self._stamps = torch.zeros(slots, dtype=torch.int32)
        self._step = 0

    def step(self, selected: torch.Tensor) -> torch.Tensor:
        """Place distinct positions; returns their slots."""
        self._step += 1
        slots = self._cache_slots[selected]
        hit = slots >= 0
        self._stamps[slots[hit].long()] = self._step
        missed = selected[~hit]
        if len(missed):
            victims = torch.topk(self._stamps, len(missed), largest=False, sorted=False).indices
            old = self._tokens[victims]
            self._cache_slots[old[old >= 0]] = -1
            self._tokens[victims] = missed
            self._cache_slots[missed] = victims.int()
            self._stamps[victims] = self._step
        return self._cache_slots[selected]
