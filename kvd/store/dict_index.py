"""The block index as a dict of dicts: what the native one is compared with."""

from __future__ import annotations

from array import array

from kvd.core.block_types import READY
from kvd.core.prefix import HASH_BYTES


class DictIndex:
    """`kvd.core.prefix.BlockIndex` over one dict for each namespace."""

    def __init__(self) -> None:
        self._spaces: dict[int, dict[bytes, int]] = {}

    def get(self, namespace: int, block_hash: bytes) -> int | None:
        """See `BlockIndex`."""
        space = self._spaces.get(namespace)
        return None if space is None else space.get(block_hash)

    def prefix(self, namespace: int, hashes: bytes) -> list[int]:
        """See `BlockIndex`."""
        space = self._spaces.get(namespace)
        found: list[int] = []
        if space is None:
            return found
        get = space.get
        for at in range(0, len(hashes), HASH_BYTES):
            block = get(hashes[at : at + HASH_BYTES])
            if block is None:
                break
            found.append(block)
        return found

    def put(self, namespace: int, block_hash: bytes, block: int) -> None:
        """See `BlockIndex`."""
        space = self._spaces.setdefault(namespace, {})
        assert block_hash not in space, "key twice"
        space[block_hash] = block

    def load(self, states: bytearray, namespaces: array[int], hashes: bytearray) -> list[int]:
        """See `BlockIndex`."""
        known = []
        for block, state in enumerate(states):
            if state != READY:
                continue
            block_hash = bytes(hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES])
            if self.get(namespaces[block], block_hash) is None:
                self.put(namespaces[block], block_hash, block)
            else:
                known.append(block)
        return known

    def remove(self, namespace: int, block_hash: bytes) -> None:
        """See `BlockIndex`."""
        space = self._spaces[namespace]
        del space[block_hash]
        if not space:
            del self._spaces[namespace]

    def clear(self, capacity: int | None = None) -> None:
        """See `BlockIndex`."""
        self._spaces.clear()

    def __len__(self) -> int:
        return sum(len(space) for space in self._spaces.values())
