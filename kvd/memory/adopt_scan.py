"""What an earlier life of the daemon left in the pool, read at memory speed.

`MetaTable.scan` yields an object for each header, which takes seconds for a million blocks. Here
they go into columns in native code, without the interpreter lock, so that the sockets answer
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvd.core.adopted import AdoptedBlocks
from kvd.core.block_columns import BlockColumns
from kvd.core.prefix import HASH_BYTES
from kvd.memory.layout_v1 import SUPERBLOCK_BYTES, MetaTable
from kvd_kernels.host import Mapping, scan_headers


def scan_ready(mapping: Mapping, digests: Iterable[bytes], tokens_max: int) -> AdoptedBlocks:
    """Read and check all headers; nothing is written.

    Args:
        mapping: the metadata.
        digests: namespaces in order of their numbers, 32 bytes each.
        tokens_max: tokens of a block of this pool.
    Raises: ValueError: not such metadata, another version, damaged, or cut short.
    """
    columns = BlockColumns(MetaTable(mapping).superblock.block_count)
    known = b"".join(digests)
    assert len(known) % HASH_BYTES == 0
    torn, odd = scan_headers(
        mapping,
        SUPERBLOCK_BYTES,
        known,
        tokens_max,
        columns.states,
        columns.namespaces,
        columns.hashes,
        columns.tokens,
    )
    return AdoptedBlocks(columns, torn, odd)
