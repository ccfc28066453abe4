"""Sums over tensor-parallel ranks, with the same bits on every rank and for every split.

A sum of floats depends on the order of its additions. Here it is always the same binary tree over
heads: each rank adds its own heads pairwise (`tree_sum`), then the ranks' sums are added pairwise
in rank order. One rank with four heads and two ranks with two heads do the same additions.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # exported, but not by its stubs
    FileStore,
    ProcessGroupGloo,
)

_LOOPBACK: Final = "127.0.0.1"


class CollectiveError(RuntimeError):
    """A rank is missing, late or gone; the step cannot be finished."""


class Collective(Protocol):
    """The ranks of one engine, seen from one of them."""

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Number of ranks, a power of two."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, the same bits on each; `tensor` is left as it is."""


class SingleProcess:
    """One rank that is the whole engine."""

    rank: Final = 0
    size: Final = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return `tensor` itself."""
        return tensor


class GlooCollective:
    """Ranks on one host, one per process or thread, talking gloo over loopback.

    Uses a process group of its own, never torch's default group, so an engine and its host
    application do not collide and one process may hold several ranks.
    """

    def __init__(self, init_method: str, rank: int, size: int, timeout_s: float = 60.0) -> None:
        """Meet the other ranks; waits for them up to `timeout_s`.

        Args:   init_method: `file:///path`, a path that does not exist yet, the same for all ranks.
                timeout_s: deadline of this call and of each all_reduce, in seconds.
        Raises: ValueError naming the argument; CollectiveError if ranks are missing at the
                deadline.
        """
        if size < 1 or size & (size - 1):
            raise ValueError(f"size is {size}; give a power of two")
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; give 0 to {size - 1}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; give more than 0")
        url = urlsplit(init_method)
        if url.scheme != "file" or url.netloc or not url.path:
            raise ValueError(f"init_method is {init_method!r}; give file:///path")
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        # The group's threads must be gone before the interpreter ends, or the process aborts. A
        # finalizer runs early enough, and needs a container that it can empty.
        self._groups = [self._meet(url.path)]
        self._finalizer = weakref.finalize(self, self._groups.clear)

    def _meet(self, path: str) -> Any:
        gloo: Any = ProcessGroupGloo  # its stubs lack the options
        options = gloo._Options()
        # By name or interface lookup gloo may pick an address other ranks cannot reach.
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timedelta(seconds=self._timeout_s)
        store = FileStore(path, self.size)
        store.set_timeout(options._timeout)
        try:
            return gloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.size} did not meet the others within "
                f"{self._timeout_s} s at {path}: {error}"
            ) from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks; CollectiveError if one does not answer in time."""
        if not self._groups:
            raise CollectiveError(f"rank {self.rank} of {self.size} is closed")
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            self._groups[0].allgather([parts], [tensor.contiguous()]).wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.size} lost another rank: {error}"
            ) from error
        return tree_sum(torch.stack(parts))

    def close(self) -> None:
        """Leave the other ranks; happens by itself when the object or the process ends."""
        self._finalizer()


def tree_sum(parts: Tensor) -> Tensor:
    """Add parts [n, ...], n a power of two, pairwise: ((0 + 1) + (2 + 3)) + ...; returns [...]."""
    while parts.shape[0] > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]
