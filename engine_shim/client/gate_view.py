"""The gate page as the member sees it: mapped read-only, slept on, read one last time."""

from __future__ import annotations

from contextlib import ExitStack

from kvd.wire.gate_layout import GATE_HEADER_BYTES, parse_header, word_offset
from kvd_kernels.host import GateStatistics, GateWaiter, Mapping


class GateView:
    """One gate page and the sleepers on it."""

    def __init__(
        self, page_fd: int, page_bytes: int, event_fd: int, hangup_fd: int, num_slots: int
    ) -> None:
        """Map the page; the descriptors stay the caller's.

        Args:
            event_fd: kvd adds to it after it stored words.
            hangup_fd: the attach connection; its end wakes every sleeper.
            num_slots: slots that the page must have.

        Raises:
            ValueError: not a gate page, or one with another number of slots.
            OSError: it cannot be mapped.
        """
        with ExitStack() as undo:
            page = Mapping(page_fd, page_bytes, writable=False)
            undo.callback(page.close)
            header = parse_header(
                page.read_bytes(0, min(page_bytes, GATE_HEADER_BYTES)), page_bytes
            )
            if header.num_slots != num_slots:
                raise ValueError(f"a gate page of {header.num_slots} slots, not {num_slots}")
            waiter = GateWaiter(page, event_fd, hangup_fd)
            undo.pop_all()
        self.boot_id = header.boot_id
        self.is_suspect = False
        """A sleeper saw the connection end, or the wake-up break: set by it, read by the link."""
        self._page = page
        self._waiter = waiter

    def wait_free(
        self, slot: int, after_epoch: int, timeout_ns: int, spin_ns: int
    ) -> tuple[str, int]:
        """See `GateWaiter.wait_free`; after `close` every wait ends with ("hangup", -1)."""
        return self._waiter.wait_free(slot, after_epoch, timeout_ns, spin_ns=spin_ns)

    def hung_up(self) -> bool:
        """Whether kvd, or our connection to it, has ended by now; asks the kernel."""
        return self._waiter.hung_up()

    def word(self, slot: int) -> int:
        """The slot's word as it is now; not after `close`."""
        return self._page.load_u64(word_offset(slot))

    def statistics(self) -> GateStatistics:
        """What the sleepers did."""
        return self._waiter.statistics()

    def close(self) -> None:
        """Wake every sleeper, wait until they have left, unmap. Idempotent."""
        self._waiter.close()
        self._page.close()
