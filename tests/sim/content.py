"""What requests are about: documents with common beginnings, and the right value of each row."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Document(NamedTuple):
    """Tokens [0, fork) are common to a family, later ones belong to one branch of it."""

    family: int
    branch: int
    fork: int

    def stem(self, row: int) -> int:
        """What the token at this row, and all before it, are a part of."""
        return self.family * 64 + (self.branch if row >= self.fork else 0)

    def tag(self, row: int, layer: int, shard: int) -> int:
        """The only right content of one row of one layer of one shard; positive."""
        return ((self.stem(row) * 64 + row) * 8 + layer) * 2 + shard + 1

    def tags(self, start: int, end: int, layer: int, shard: int) -> list[int]:
        """Contents of rows [start, end)."""
        return [self.tag(row, layer, shard) for row in range(start, end)]

    def block_hash(self, end: int) -> bytes:
        """Hash of the block whose last row is end - 1; it covers all rows before it too."""
        text = f"{self.stem(end - 1)}/{end}"
        return hashlib.blake2b(text.encode(), digest_size=32).digest()


def describe(tag: int) -> str:
    """A row's content for people."""
    if tag <= 0:
        return "torn" if tag else "nothing"
    rest, shard = divmod(tag - 1, 2)
    rest, layer = divmod(rest, 8)
    stem, row = divmod(rest, 64)
    return f"stem {stem} row {row} layer {layer} shard {shard}"
