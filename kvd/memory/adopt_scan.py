"""What an earlier life of the daemon left in the pool, read at memory speed.

`MetaTable.scan` yields an object for each header, which takes seconds for a million blocks. Here
they go into columns and the index in native code, without the interpreter lock, so that the sockets
answer meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.core.block_columns import BlockColumns
from kvd.core.prefix import HASH_BYTES
from kvd.memory.layout_v1 import SUPERBLOCK_BYTES, MetaTable, Superblock
from kvd_kernels.host import BlockIndex, Mapping, scan_headers


@dataclass(frozen=True, slots=True)
class Scanned:
    """The headers of a pool.

    superblock: shape of the pool, as its maker wrote it.
    columns:    one entry for each block. Torn blocks and second blocks of a key are reset there,
                but their headers still say otherwise: `MetaTable.free` mends that.
    digests:    the namespaces by the number that `columns` and the index know them by.
    torn:       blocks whose header is damaged, in order.
    duplicates: blocks whose key a block before them has, in order.
    """

    superblock: Superblock
    columns: BlockColumns
    digests: tuple[bytes, ...]
    torn: tuple[int, ...]
    duplicates: tuple[int, ...]


def scan_ready(mapping: Mapping, index: BlockIndex, total: int | None = None) -> Scanned:
    """Read all headers, check them, and fill an index with the keys of the ready blocks.

    Args:
        mapping: the metadata; nothing is written.
        index: what it held is forgotten. Until the end nobody else may use it.
        total: blocks that the pool has now; None for as many as it had. The headers of blocks
            beyond are not looked at, and further blocks are reset.
    Raises: ValueError: not such metadata, another version, damaged, or cut short.
    """
    superblock = MetaTable(mapping).superblock
    total = superblock.block_count if total is None else total
    count = min(total, superblock.block_count)
    index.clear(total)
    columns = BlockColumns(total)
    digests, torn, duplicates = scan_headers(
        mapping,
        SUPERBLOCK_BYTES,
        index,
        memoryview(columns.states)[:count],
        memoryview(columns.namespaces)[:count],
        memoryview(columns.hashes)[: count * HASH_BYTES],
        memoryview(columns.tokens)[:count],
    )
    return Scanned(superblock, columns, tuple(digests), tuple(torn), tuple(duplicates))
