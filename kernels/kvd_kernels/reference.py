"""The definition of each native operation, in plain Python.

Tests compare `kvd_kernels.host` with this file; where the two differ, this file is right. It is
written to be read, not to be fast.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def crc32c(data: bytes, seed: int = 0) -> int:
    """Return the CRC-32C of data, continued from seed, one bit at a time."""
    crc = seed ^ _CRC_MASK
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CRC32C_POLYNOMIAL if crc & 1 else 0)
    return crc ^ _CRC_MASK
