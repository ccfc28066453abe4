"""The gate page of one worker member: kvd writes the state of its slots, the member reads.

The layout is in `kvd.wire.gate_layout`, since the member parses it. Order of creation: map for
writing, write the header, then seal FUTURE_WRITE: from then on nobody, this process included, can
map the page for writing again, while the mapping that exists keeps its right.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from typing import Final

from kvd.core.errors import LocalError
from kvd.core.units import align_up, format_size
from kvd.wire.gate_layout import (
    gate_page_bytes,
    make_word,
    pack_header,
    split_word,
    word_offset,
)
from kvd_kernels.host import Mapping

_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; not among Python's constants
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class GatePage:
    """A gate page that this process writes; all words start closed, at epoch 0."""

    def __init__(self, num_slots: int, boot_id: bytes) -> None:
        """Make the page.

        Args:
            num_slots: at least 1.
            boot_id: 16 bytes, of this life of the daemon.

        Raises:
            ValueError: num_slots or boot_id out of range.
            LocalError(memory_short): the kernel refused the file or its mapping.
        """
        header = pack_header(boot_id, num_slots)
        size = align_up(gate_page_bytes(num_slots), os.sysconf("SC_PAGE_SIZE"))
        with ExitStack() as undo:
            try:
                fd = os.memfd_create("kvd-gate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, fd)
                os.ftruncate(fd, size)
                mapping = Mapping(fd, size, writable=True)
                undo.callback(mapping.close)
                mapping.populate(0, size)  # a store must never fault for want of memory
            except OSError as error:
                raise LocalError(
                    "memory_short",
                    region="gate page",
                    need=format_size(size),
                    free="a part",
                    limit=f"the kernel refused: {error.strerror}",
                    fix="Free memory on this host or raise its control group's limit.",
                ) from error
            mapping.write_bytes(0, header)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            undo.pop_all()
        self._fd = fd
        self._mapping = mapping
        self._num_slots = num_slots
        self._last = [0] * num_slots

    @property
    def fd(self) -> int:
        """The file; owned by the page, duplicated by sending it. It can only be mapped to read."""
        return self._fd

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self._num_slots

    @property
    def size(self) -> int:
        """Bytes of the file, a whole number of OS pages."""
        return self._mapping.size

    def set(self, slot: int, epoch: int, state: int) -> None:
        """Store the word of a slot with release order; the same word again is harmless.

        Args:
            slot: 0 .. num_slots - 1.
            epoch: number of releases so far; never less than the slot's word has.
            state: STATE_* of `kvd.wire.gate_layout`.

        Raises:
            IndexError: slot out of range.
            ValueError: epoch goes back, does not fit in 56 bits, or the state is unknown.
        """
        if not 0 <= slot < self._num_slots:
            raise IndexError(f"slot {slot} is outside the {self._num_slots} slots of the page")
        word = make_word(epoch, state)
        if epoch < self._last[slot]:
            # A member that sees an old epoch again would take one tenancy twice.
            last = self._last[slot]
            raise ValueError(f"epoch of slot {slot} would go back from {last} to {epoch}")
        self._last[slot] = epoch
        self._mapping.store_u64(word_offset(slot), word)

    def get(self, slot: int) -> tuple[int, int]:
        """Return (epoch, state) of a slot.

        Raises: IndexError: slot out of range.
        """
        if not 0 <= slot < self._num_slots:
            raise IndexError(f"slot {slot} is outside the {self._num_slots} slots of the page")
        return split_word(self._mapping.load_u64(word_offset(slot)))

    def close(self) -> None:
        """Unmap and close; members keep the page as it is. Idempotent."""
        if self._fd < 0:
            return
        self._mapping.close()
        os.close(self._fd)
        self._fd = -1
