"""The definition of each native operation, in plain Python.

Tests compare `kvd_kernels.host` with this file; where the two differ, this file is right. It is
written to be read, not to be fast.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from itertools import islice
from typing import Final

WORD_CLOSED: Final = 0  # no slot here, or its member is gone
WORD_FREE: Final = 1
WORD_HELD: Final = 2
WORD_QUARANTINED: Final = 3  # suspect, and no fence can be had: never free again

EPOCH_MAX: Final = (1 << 56) - 1
_STATE_BITS: Final = 8
_STATE_MASK: Final = (1 << _STATE_BITS) - 1

_CRC32C_POLYNOMIAL: Final = 0x82F63B78  # 0x1EDC6F41 with its bits reversed
_CRC_MASK: Final = 0xFFFFFFFF

SPAN_WORDS: Final = 3
NOT_COPIED: Final = (1 << 64) - 1
"""Destination of a span that is only read for its checksum."""

HASH_BYTES: Final = 32
HEADER_BYTES: Final = 128
_WORD_RESET: Final = 0
_WORD_FILLING: Final = 0x46494C4C
_WORD_READY: Final = 0x52454459


def gate_word(epoch: int, state: int) -> int:
    """Return the u64 word of a slot: `epoch << 8 | state`.

    Raises ValueError for an epoch outside 0 to EPOCH_MAX or a state that is none of WORD_*.
    """
    if not 0 <= epoch <= EPOCH_MAX:
        raise ValueError(f"epoch is {epoch} but must be 0 to {EPOCH_MAX}")
    if state not in (WORD_CLOSED, WORD_FREE, WORD_HELD, WORD_QUARANTINED):
        raise ValueError(f"state is {state} but must be one of WORD_CLOSED to WORD_QUARANTINED")
    return epoch << _STATE_BITS | state


def split_word(word: int) -> tuple[int, int]:
    """Return (epoch, state) of a slot's word.

    The state may be one that this version does not know. Raises ValueError unless word is a u64.
    """
    if not 0 <= word < 1 << 64:
        raise ValueError(f"word is {word} but must be 0 to 2**64 - 1")
    return word >> _STATE_BITS, word & _STATE_MASK


def gate_outcome(word: int, after_epoch: int) -> str | None:
    """Return how a wait ends on this word ("free" or "quarantined"), None to go on waiting."""
    epoch, state = split_word(word)
    if state == WORD_FREE and epoch > after_epoch:
        return "free"
    if state == WORD_QUARANTINED and epoch >= after_epoch:
        return "quarantined"
    return None


def copy_spans(dst: bytearray, src: bytes | bytearray, spans: Sequence[int]) -> int:
    """Copy byte ranges of src into dst; return the bytes moved.

    N spans; spans: [3 * N] of (dst_offset, src_offset, nbytes) in turn. All are checked before the
    first byte moves. Raises IndexError naming the first span outside dst or src, ValueError for a
    list that is not whole triples or, when dst is src, for a destination that overlaps a source.
    """
    if len(spans) % SPAN_WORDS:
        raise ValueError(f"spans has {len(spans)} words, which is not a multiple of {SPAN_WORDS}")
    triples = list(zip(spans[0::3], spans[1::3], spans[2::3], strict=True))
    for number, (to, start, count) in enumerate(triples):
        if to + count > len(dst) or start + count > len(src):
            raise IndexError(f"span {number} does not fit")
    if dst is src and any(
        to < start + from_count and start < to + count and count and from_count
        for to, _, count in triples
        for _, start, from_count in triples
    ):
        raise ValueError("a destination overlaps a source")
    for to, start, count in triples:
        dst[to : to + count] = src[start : start + count]
    return sum(count for _, _, count in triples)


def copy_sums(
    dst: bytearray,
    src: bytes | bytearray,
    spans: Sequence[int],
    counts: Sequence[int],
    sums: MutableSequence[int],
) -> int:
    """Copy byte ranges and checksum them in groups; return the bytes moved.

    N spans in G groups; spans: [3 * N] as for `copy_spans`, or with NOT_COPIED as destination:
    only read. counts: [G], spans of each group in turn. sums: [G], sums[g] becomes the CRC-32C of
    the source bytes of group g in order, continued from what it was. Raises as `copy_spans`, and
    ValueError when counts do not add up to N or sums has not G items.
    """
    if len(sums) != len(counts) or SPAN_WORDS * sum(counts) != len(spans):
        raise ValueError("counts, sums and spans do not add up")
    triples = list(zip(spans[0::3], spans[1::3], spans[2::3], strict=True))
    for number, (to, start, count) in enumerate(triples):
        if start + count > len(src) or (to != NOT_COPIED and to + count > len(dst)):
            raise IndexError(f"span {number} does not fit")
    before = bytes(src)
    copied = [word for triple in triples if triple[0] != NOT_COPIED for word in triple]
    moved = copy_spans(dst, src, copied)
    rest = iter(triples)
    for group, count in enumerate(counts):
        for _, start, length in islice(rest, count):
            sums[group] = crc32c(before[start : start + length], sums[group])
    return moved


def checksum_spans(
    src: bytes, spans: Sequence[int], counts: Sequence[int], sums: MutableSequence[int]
) -> None:
    """Checksum ranges in groups; spans: [2 * N] of (offset, nbytes), the rest as `copy_sums`."""
    triples = [
        word
        for start, count in zip(spans[0::2], spans[1::2], strict=True)
        for word in (NOT_COPIED, start, count)
    ]
    copy_sums(bytearray(), src, triples, counts, sums)


class CopyQueue:
    """Copies one after another, in the order of `submit`: each finds what those before it wrote.

    When a copy runs is not said, only that it has when it is finished: here, not before then. The
    lists, and what the sums continue from, are those of `submit`; sums are stored by `finish`.
    """

    def __init__(self) -> None:
        self._queued: dict[int, Callable[[], Callable[[], int]]] = {}
        self._ended: dict[int, Callable[[], int]] = {}
        self._last = 0
        self._closed = False

    def submit(
        self,
        dst: bytearray,
        src: bytes | bytearray,
        spans: Sequence[int],
        counts: Sequence[int] = (),
        sums: MutableSequence[int] | None = None,
        *,
        dst_shift: int = 0,
        src_shift: int = 0,
    ) -> int:
        """Queue a copy; return its ticket. Raises ValueError once closed.

        Args: dst_shift, src_shift: bytes added to each destination that is one, and each source.
        """
        if self._closed:
            raise ValueError("the queue is closed")
        spans = list(spans)
        for at in range(0, len(spans), 3):
            spans[at] += dst_shift if spans[at] != NOT_COPIED else 0
            spans[at + 1] += src_shift
        own_spans, own_counts, own_sums = list(spans), list(counts), list(sums or ())

        def run() -> Callable[[], int]:
            if sums is None:
                moved = copy_spans(dst, src, own_spans)
            else:
                moved = copy_sums(dst, src, own_spans, own_counts, own_sums)

            def end() -> int:
                if sums is not None:
                    sums[:] = own_sums
                return moved

            return end

        self._last += 1
        self._queued[self._last] = run
        return self._last

    def finish(self, ticket: int) -> int:
        """Return the bytes that a copy moved, or raise what it raised; once for each ticket.

        Raises: ValueError for a ticket that is none, or of a copy that `close` dropped.
        """
        if ticket not in self._queued and ticket not in self._ended:
            raise ValueError(f"ticket {ticket} is none that is still to be finished")
        while ticket in self._queued:
            first = next(iter(self._queued))
            self._ended[first] = _outcome(self._queued.pop(first))
        return self._ended.pop(ticket)()

    def cancel(self, ticket: int) -> bool:
        """Drop a copy that has not begun; return whether it was dropped."""
        return self._queued.pop(ticket, None) is not None

    def close(self) -> None:
        """Drop what has not begun, and take no more."""
        self._closed = True
        for ticket in list(self._queued):
            del self._queued[ticket]
            self._ended[ticket] = _raiser(ValueError("the queue was closed before it"))


def _outcome(run: Callable[[], Callable[[], int]]) -> Callable[[], int]:
    try:
        return run()
    except (IndexError, ValueError) as error:
        return _raiser(error)


def _raiser(error: Exception) -> Callable[[], int]:
    def end() -> int:
        raise error

    return end


def crc32c(data: bytes, seed: int = 0) -> int:
    """Return the CRC-32C of data, continued from seed, one bit at a time."""
    crc = seed ^ _CRC_MASK
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CRC32C_POLYNOMIAL if crc & 1 else 0)
    return crc ^ _CRC_MASK


class BlockIndex:
    """Keys (namespace, 32-byte hash) of ready blocks, at most `capacity` of them.

    Raises: ValueError for a hash of another length, or a blob that is not whole hashes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: dict[tuple[int, bytes], int] = {}

    def get(self, namespace: int, block_hash: bytes) -> int | None:
        """Return the block with this key, None when there is none."""
        return self._blocks.get((namespace, _whole_hash(block_hash)))

    def prefix(self, namespace: int, hashes: bytes) -> list[int]:
        """Return the blocks of the longest run of leading hashes present."""
        if len(hashes) % HASH_BYTES:
            raise ValueError(f"hashes has {len(hashes)} bytes, which is not a multiple of 32")
        found = []
        for at in range(0, len(hashes), HASH_BYTES):
            block = self._blocks.get((namespace, hashes[at : at + HASH_BYTES]))
            if block is None:
                break
            found.append(block)
        return found

    def put(self, namespace: int, block_hash: bytes, block: int) -> None:
        """Add a key. Raises ValueError when it is there, OverflowError when the index is full."""
        key = (namespace, _whole_hash(block_hash))
        if key in self._blocks:
            raise ValueError(f"the key of block {block} is in the index already")
        if len(self._blocks) == self.capacity:
            raise OverflowError(f"the index is full: it has room for {self.capacity} keys")
        self._blocks[key] = block

    def remove(self, namespace: int, block_hash: bytes) -> None:
        """Remove a key. Raises KeyError when it is not there."""
        del self._blocks[namespace, _whole_hash(block_hash)]

    def clear(self, capacity: int | None = None) -> None:
        """Forget every key; from now on there is room for `capacity`, or as before for None."""
        self._blocks.clear()
        self.capacity = self.capacity if capacity is None else capacity

    def load(self, states: bytes, namespaces: Sequence[int], hashes: bytes) -> list[int]:
        """Put the keys of the blocks in state 2; return those whose key is there already.

        states, namespaces: [N]; hashes: [N, 32].
        """
        known = []
        for block, state in enumerate(states):
            block_hash = hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
            if state == 2 and self.get(namespaces[block], block_hash) is None:
                self.put(namespaces[block], block_hash, block)
            elif state == 2:
                known.append(block)
        return known

    def __len__(self) -> int:
        return len(self._blocks)


def _whole_hash(block_hash: bytes) -> bytes:
    if len(block_hash) != HASH_BYTES:
        raise ValueError(f"block_hash must have 32 bytes, not {len(block_hash)}")
    return block_hash


def scan_headers(
    headers: bytes,
    digests: bytes,
    tokens_max: int,
    states: bytearray,
    namespaces: MutableSequence[int],
    hashes: bytearray,
    tokens: MutableSequence[int],
) -> tuple[list[int], list[int]]:
    """Read block headers of pool metadata (layout v1) into columns.

    headers: [N, 128], of (state u32, seq u32, namespace 32, hash 32, tokens u32, flags u32, zeros,
    crc32c u32 of bytes 4 .. 123), little endian. digests: [K, 32], namespaces by their number.
    states: [N], out: 0 reset, 1 filling, 2 ready. namespaces, tokens: [N], out. hashes: [N, 32],
    out. The columns hold zeros before, and do so after for what is not ready. Returns (torn, odd):
    blocks whose header is none; ready blocks of another namespace, or with no or too many tokens.
    """
    numbers = [digests[at : at + HASH_BYTES] for at in range(0, len(digests), HASH_BYTES)]
    torn: list[int] = []
    odd: list[int] = []
    for block in range(len(states)):
        header = headers[block * HEADER_BYTES : (block + 1) * HEADER_BYTES]
        word = int.from_bytes(header[:4], "little")
        digest, count = header[8:40], int.from_bytes(header[72:76], "little")
        if word == _WORD_RESET:
            continue
        if word == _WORD_FILLING:
            states[block] = 1
        elif word != _WORD_READY or crc32c(header[4:-4]) != int.from_bytes(header[-4:], "little"):
            torn.append(block)
        elif digest not in numbers or not 0 < count <= tokens_max:
            odd.append(block)
        else:
            states[block] = 2
            namespaces[block] = numbers.index(digest)
            hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES] = header[40:72]
            tokens[block] = count
    return torn, odd


def unlink_blocks(
    after: MutableSequence[int], before: MutableSequence[int], home: bytearray, blocks: list[int]
) -> list[int]:
    """Take blocks out of their queues; return how many left each queue.

    N blocks, Q queues. after, before: [N + Q], neighbours in a ring, entry N + q the head of queue
    q. home: [N], 0 for a block in no queue, else 1 + queue. Raises IndexError for a block that is
    none; those before it have left.
    """
    left = [0] * (len(after) - len(home))
    for block in blocks:
        if not 0 <= block < len(home):
            raise IndexError(f"block {block} is outside the {len(home)} blocks of the pool")
        if home[block]:
            after[before[block]] = after[block]
            before[after[block]] = before[block]
            left[home[block] - 1] += 1
            home[block] = 0
    return left


def link_range(
    after: MutableSequence[int],
    before: MutableSequence[int],
    home: bytearray,
    queue: int,
    start: int,
    stop: int,
) -> None:
    """Put blocks start .. stop - 1, none of them in a queue, at the end of a queue.

    Arrays as for `unlink_blocks`. Raises IndexError when the queue or a block is none, or the range
    is empty; nothing changes then.
    """
    head = len(home) + queue
    if not 0 <= start < stop <= len(home) or not len(home) <= head < len(after):
        raise IndexError(f"blocks {start} to {stop} and queue {queue} are not all in the pool")
    for block in range(start, stop):
        last = before[head]
        after[last] = before[head] = block
        before[block], after[block] = last, head
        home[block] = queue + 1


def mark_blocks(marks: bytearray, home: bytes, blocks: list[int]) -> bool:
    """Set marks[block] to 1 for each block; return whether home[block] is not 0 for any of them.

    marks, home: [N]. Raises IndexError for a block that is none; those before it are marked.
    """
    for block in blocks:
        if not 0 <= block < len(home):
            raise IndexError(f"block {block} is outside the {len(home)} blocks of the pool")
        marks[block] = 1
    return any(home[block] for block in blocks)
