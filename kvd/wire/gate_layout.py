"""Layout of a gate page: how a member learns, without a message, that a slot is free.

One page per worker member, written by kvd alone and mapped read-only by the member::

    byte 0                64                128
    | header, 64 bytes    | line of slot 0  | line of slot 1 ...
                          | u64 word, then unused

The header is `<8s16sII`: magic, boot id of the kvd that made the page, number of slots, version. A
word is `epoch << 8 | state`, native byte order, stored with release order; a line each keeps two
words from sharing a cache line. A page never changes its boot id: a new kvd makes a new page.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

GATE_MAGIC: Final = b"KVDGATE1"
GATE_VERSION: Final = 1
GATE_HEADER_BYTES: Final = 64
GATE_LINE_BYTES: Final = 64
BOOT_ID_BYTES: Final = 16

STATE_CLOSED: Final = 0
STATE_FREE: Final = 1
STATE_HELD: Final = 2
STATE_QUARANTINED: Final = 3
STATE_NAMES: Final = ("closed", "free", "held", "quarantined")

EPOCH_MAX: Final = (1 << 56) - 1

_HEADER: Final = struct.Struct("<8s16sII")


class GateHeader(NamedTuple):
    """What the header of a page says; boot_id has 16 bytes."""

    boot_id: bytes
    num_slots: int


def gate_page_bytes(num_slots: int) -> int:
    """Return the bytes of a page for so many slots, not rounded to OS pages."""
    return GATE_HEADER_BYTES + num_slots * GATE_LINE_BYTES


def word_offset(slot: int) -> int:
    """Return the byte offset of a slot's word."""
    return GATE_HEADER_BYTES + slot * GATE_LINE_BYTES


def pack_header(boot_id: bytes, num_slots: int) -> bytes:
    """Return the 64 bytes of a header.

    Raises: ValueError: boot_id has not 16 bytes, or num_slots is no positive u32.
    """
    if len(boot_id) != BOOT_ID_BYTES:
        raise ValueError(f"boot_id must have {BOOT_ID_BYTES} bytes, got {len(boot_id)}")
    if not 0 < num_slots < 1 << 32:
        raise ValueError(f"num_slots must be between 1 and 2^32 - 1, got {num_slots}")
    packed = _HEADER.pack(GATE_MAGIC, boot_id, num_slots, GATE_VERSION)
    return packed.ljust(GATE_HEADER_BYTES, b"\0")


def parse_header(data: bytes, page_bytes: int) -> GateHeader:
    """Read the first 64 bytes of a page.

    Args: page_bytes: size of the mapping, which must hold all slots that the header names.
    Raises: ValueError: not a gate page, another version, or a page that is too short.
    """
    if len(data) < GATE_HEADER_BYTES or page_bytes < GATE_HEADER_BYTES:
        raise ValueError(f"a gate page has at least {GATE_HEADER_BYTES} bytes, got {len(data)}")
    magic, boot_id, num_slots, version = _HEADER.unpack_from(data)
    if magic != GATE_MAGIC:
        raise ValueError(f"not a gate page: it starts with {magic!r}, not {GATE_MAGIC!r}")
    if version != GATE_VERSION:
        raise ValueError(f"gate page version {version} is not known, only {GATE_VERSION}")
    if num_slots == 0 or page_bytes < gate_page_bytes(num_slots):
        raise ValueError(f"a gate page of {page_bytes} bytes cannot hold {num_slots} slots")
    return GateHeader(boot_id, num_slots)


def make_word(epoch: int, state: int) -> int:
    """Return the word of an epoch and a state.

    Raises: ValueError: epoch beyond 56 bits, or an unknown state.
    """
    if not 0 <= epoch <= EPOCH_MAX:
        raise ValueError(f"epoch must be between 0 and 2^56 - 1, got {epoch}")
    if not 0 <= state < len(STATE_NAMES):
        raise ValueError(f"state must be one of 0 .. {len(STATE_NAMES) - 1}, got {state}")
    return epoch << 8 | state


def split_word(word: int) -> tuple[int, int]:
    """Return (epoch, state) of a word."""
    return word >> 8, word & 0xFF
