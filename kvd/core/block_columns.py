"""What the table keeps of every block, as columns: arrays with one entry for each block.

A pool has a million blocks, nearly all of them ready. Kept as objects they would cost the collector
tens of milliseconds at each full pass, and as many at a restart; arrays cost it nothing.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from typing import Final

from kvd.core.block_types import BlockKey
from kvd.core.prefix import HASH_BYTES

U32: Final = "I"


class BlockColumns:
    """States of all blocks, and keys and token counts of the ready ones.

    N blocks. states: [N] u8, `BlockState`. namespaces, tokens: [N] u32. hashes: [N, 32] u8.
    Of a block that is not ready only its state means something; its token count is 0.
    """

    __slots__ = ("hashes", "namespaces", "states", "tokens")

    def __init__(self, total: int) -> None:
        """All blocks reset."""
        self.states = bytearray(total)
        self.namespaces = array(U32, [0]) * total
        self.hashes = bytearray(total * HASH_BYTES)
        self.tokens = array(U32, [0]) * total

    def __len__(self) -> int:
        return len(self.states)

    def key(self, block: int) -> BlockKey:
        """The key of a ready block."""
        at = block * HASH_BYTES
        return self.namespaces[block], bytes(self.hashes[at : at + HASH_BYTES])

    def set_key(self, block: int, key: BlockKey, tokens: int) -> None:
        """The block is about to be ready under a key, with a count of at least 1."""
        at = block * HASH_BYTES
        self.namespaces[block], self.hashes[at : at + HASH_BYTES] = key
        self.tokens[block] = tokens

    def drop_key(self, block: int) -> BlockKey:
        """The block is no longer ready. Returns the key that it had."""
        self.tokens[block] = 0
        return self.key(block)

    def runs(self, state: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of each run of blocks in a state, in order.

        A pool that was used for long still has few runs for its blocks; the search is at memory
        speed.
        """
        for found in re.finditer(b"[\\x%02x]+" % state, self.states):
            yield found.span()
