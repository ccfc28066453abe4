"""Keys of blocks that were evicted lately, twelve to twenty bytes each.

A key that comes back while it is remembered shows that its block went too early. Exactly the last
`capacity` are remembered. A cheaper table that loses a few at random was tried and cost two points
of hit rate: blocks are of use in chains, and a chain of which one block is taken for new has a hole
as soon as that one goes. In order of eviction the tails of chains are forgotten before the heads.

Fingerprints have 32 bits, so a new key is taken for one of a million remembered ones about once in
four thousand times, which costs a worse guess about what to evict and nothing else.
"""

from __future__ import annotations

from array import array
from typing import Final

_PRIME: Final = 4_294_967_291
"""The largest prime of 32 bits."""

_SPREAD: Final = 0x9E3779B1


def fingerprint(namespace: int, block_hash: bytes) -> int:
    """32 bits of a key, not 0; every byte counts, for some engines pad shorter hashes."""
    return (int.from_bytes(block_hash) + namespace * _SPREAD) % _PRIME or 1


class Ghosts:
    """The last fingerprints that were added: a ring of them, and a hash table of their places."""

    def __init__(self, capacity: int) -> None:
        """Nothing is remembered."""
        self._capacity = max(1, capacity)
        # At least twice the ring, so that runs of taken slots stay short.
        slots = 1 << (2 * self._capacity - 1).bit_length()
        self._mask = slots - 1
        self._ring = array("I", bytes(4 * self._capacity))
        self._slots = array("I", bytes(4 * slots))
        self._next = 0
        self._kept = 0

    def add(self, print_: int) -> None:
        """Remember a fingerprint as the youngest; the oldest is forgotten when there are enough."""
        self.take(print_)
        place = self._next
        oldest = self._ring[place]
        if oldest:
            self.take(oldest)
        slots, mask = self._slots, self._mask
        slot = print_ & mask
        while slots[slot]:
            slot = (slot + 1) & mask
        slots[slot] = place + 1
        self._ring[place] = print_
        self._next = (place + 1) % self._capacity
        self._kept += 1

    def take(self, print_: int) -> bool:
        """Whether a fingerprint is remembered; it is not any more afterwards."""
        slots, ring, mask = self._slots, self._ring, self._mask
        slot = print_ & mask
        while True:
            place = slots[slot]
            if not place:
                return False
            if ring[place - 1] == print_:
                break
            slot = (slot + 1) & mask
        ring[place - 1] = 0
        self._kept -= 1
        self._close_gap(slot)
        return True

    def __len__(self) -> int:
        """How many are remembered."""
        return self._kept

    def _close_gap(self, gap: int) -> None:
        """Empty a slot; what a search would have passed it for moves up."""
        slots, ring, mask = self._slots, self._ring, self._mask
        slot = gap
        while True:
            slot = (slot + 1) & mask
            place = slots[slot]
            if not place:
                break
            home = ring[place - 1] & mask
            if (slot - home) & mask >= (slot - gap) & mask:
                slots[gap] = place
                gap = slot
        slots[gap] = 0
