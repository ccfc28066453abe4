"""The prefix index as the core knows it: (namespace, block hash) -> ready block.

The hash of a block covers all tokens before it too (the engine chains them), so the longest
prefix hit is the longest run of leading hashes that are present.
"""

from __future__ import annotations

from array import array
from typing import Protocol

HASH_BYTES = 32


class BlockIndex(Protocol):
    """Where ready blocks are found. Implementations live in `kvd.store`."""

    def get(self, namespace: int, block_hash: bytes) -> int | None:
        """The ready block with this key."""

    def prefix(self, namespace: int, hashes: bytes) -> list[int]:
        """Blocks of the longest run of leading hashes present.

        hashes: n x 32 bytes, first block first.
        """

    def put(self, namespace: int, block_hash: bytes, block: int) -> None:
        """Add a key that is not there yet."""

    def load(self, states: bytearray, namespaces: array[int], hashes: bytearray) -> list[int]:
        """Add the keys of all ready blocks; return those whose key another block has, in order.

        Columns as in `kvd.core.block_columns`. Of two blocks with one key the first has it.
        """

    def remove(self, namespace: int, block_hash: bytes) -> None:
        """Remove a key that is there."""

    def clear(self, capacity: int | None = None) -> None:
        """Forget everything. At most `capacity` keys will come; None: as many as before."""

    def __len__(self) -> int:
        """Number of keys."""
