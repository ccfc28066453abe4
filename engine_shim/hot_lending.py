"""Which hot buffers are free, and which only seem so because a copy into them still runs."""

from __future__ import annotations

from collections.abc import Iterable

from engine_shim.device import DeviceCode, DeviceError, Event


class NoHotBufferError(RuntimeError):
    """All hot buffers are lent or parked."""


def has_ended(event: Event) -> bool:
    """Whether nothing that an event covers runs any more, be it done, failed or cancelled."""
    try:
        return event.query()
    except DeviceError as error:
        return error.code is not DeviceCode.ABANDONED


class BufferLender:
    """Buffers 0 to num_buffers - 1; the lowest free one is lent first."""

    def __init__(self, num_buffers: int) -> None:
        """All are free."""
        self._num_buffers = num_buffers
        self._free = list(range(num_buffers - 1, -1, -1))
        self._parked: list[tuple[int, tuple[Event, ...]]] = []

    @property
    def num_free(self) -> int:
        """Buffers that can be lent now."""
        self._collect()
        return len(self._free)

    @property
    def num_parked(self) -> int:
        """Buffers given back whose copies still run."""
        self._collect()
        return len(self._parked)

    def lend(self) -> int:
        """Return a buffer that nobody touches. Raises: NoHotBufferError."""
        self._collect()
        if not self._free:
            raise NoHotBufferError(
                f"none of the {self._num_buffers} hot buffers is free, {len(self._parked)} wait "
                "for a copy to end; preempt or close a request, or raise num_buffers"
            )
        return self._free.pop()

    def give_back(self, buffer: int, copies: Iterable[Event]) -> None:
        """Take a buffer back; it is free when the copies into it have ended."""
        self._parked.append((buffer, tuple(copies)))
        self._collect()

    def _collect(self) -> None:
        ended = [(buffer, all(map(has_ended, copies))) for buffer, copies in self._parked]
        freed = {buffer for buffer, is_free in ended if is_free}
        self._parked = [entry for entry in self._parked if entry[0] not in freed]
        self._free = sorted({*self._free, *freed}, reverse=True)
