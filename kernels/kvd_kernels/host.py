"""Native host operations: shared mappings, copies between them, release words, checksums.

Everything that kvd and the shim do to shared memory goes through here, because Python alone can
neither store with release order, nor copy without holding the interpreter lock, nor wait on a word
without a wake being lost. Nothing here knows slots or requests, and nothing needs numpy or torch:
buffers in, numbers out.

* `Mapping`: one `mmap` of a file descriptor, with bounds on every access.
* `copy_spans`: a list of byte ranges from one mapping into another, past the cache.
* `copy_sums`: the same with a checksum of each group of ranges; `checksum_spans` only reads.
* `CopyQueue`: such copies one after another in a native thread.
* `GateWaiter`: sleeping until a slot's word on a gate page says free.
* `crc32c`: checksum of headers and spans.
* `BlockIndex`: a hash table of block keys that costs no Python object per key.
* `scan_headers`: the headers of a pool that an earlier life left, into columns.
* `unlink_blocks`, `link_range`, `mark_blocks`: steps for many blocks at once of queues that are
  arrays.

What each operation means is defined in `kvd_kernels.reference`.

Gate page
---------
One page per worker member, written by kvd alone and mapped read-only by the member::

    byte 0                64                128
    | header, 64 bytes    | line of slot 0  | line of slot 1 ...
                          | u64 word, then unused

A word is `epoch << 8 | state`. The epoch (56 bits) grows by one at each release, so a word that
says free is news only when its epoch is greater than the last one acquired.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvd_kernels import _host
from kvd_kernels._host import (
    BlockIndex,
    CopyQueue,
    Mapping,
    checksum_spans,
    copy_kernels,
    copy_spans,
    copy_sums,
    crc32c,
    link_range,
    mark_blocks,
    scan_headers,
    unlink_blocks,
)
from kvd_kernels.reference import (
    EPOCH_MAX,
    NOT_COPIED,
    WORD_CLOSED,
    WORD_FREE,
    WORD_HELD,
    WORD_QUARANTINED,
    gate_word,
    split_word,
)

__all__ = [
    "EPOCH_MAX",
    "GATE_HEADER_BYTES",
    "GATE_LINE_BYTES",
    "NOT_COPIED",
    "WORD_CLOSED",
    "WORD_FREE",
    "WORD_HELD",
    "WORD_QUARANTINED",
    "BlockIndex",
    "CopyQueue",
    "GateStatistics",
    "GateWaiter",
    "Mapping",
    "checksum_spans",
    "copy_kernels",
    "copy_spans",
    "copy_sums",
    "crc32c",
    "gate_word",
    "link_range",
    "mark_blocks",
    "scan_headers",
    "split_word",
    "unlink_blocks",
]

GATE_HEADER_BYTES: Final = 64
GATE_LINE_BYTES: Final = 64  # a cache line per slot: no two words share one


class GateStatistics(NamedTuple):
    """What a waiter has done so far.

    waits:    calls of `wait_free` that returned.
    spins:    of these, those that ended while still spinning, without a sleep.
    wakes:    times the eventfd was consumed; less than `waits` when one wake served several.
    timeouts: waits that ended at their deadline.
    hangups:  waits that ended because the connection did, or because of `close`.
    """

    waits: int
    spins: int
    wakes: int
    timeouts: int
    hangups: int


class GateWaiter(_host.GateWaiter):
    __doc__ = _host.GateWaiter.__doc__
    __slots__ = ()

    def statistics(self) -> GateStatistics:
        """Return the counts since the waiter was made."""
        return GateStatistics(*self.counters())
