"""The loads of one request that were not seen to end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from engine_shim.device import DeviceCode, DeviceError, Event, Stream

SCRATCH: Final = -1
"""Key of the scratch tile's load, beside those of the layers."""


class RequestLoads:
    """Loads by layer, or SCRATCH: at most one each."""

    def __init__(self, request: str, timeout_ns: int, on_failure: Callable[[int], None]) -> None:
        """Wait timeout_ns at most for a load; tell on_failure the key of one that failed."""
        self._request = request
        self._timeout_ns = timeout_ns
        self._on_failure = on_failure
        self._events: dict[int, Event] = {}

    def add(self, key: int, event: Event) -> None:
        """Note a load by the event behind it."""
        self._events[key] = event

    def event(self, key: int) -> Event | None:
        """Return the event of a load that was not seen to end."""
        return self._events.get(key)

    def events(self) -> tuple[Event, ...]:
        """Return the events of all loads that were not seen to end."""
        return tuple(self._events.values())

    def hold(self, key: int, stream: Stream) -> None:
        """Let a stream wait for a load, if there is one; it takes over the load's failure.

        The load is kept: `end` sees its end, without a wait once the stream has passed it.
        """
        event = self._events.get(key)
        if event is not None:
            stream.wait(event)

    def end(self, key: int) -> None:
        """Wait for a load, if there is one.

        Raises: DeviceError when it failed, or when it is not known to have ended: it is kept then.
        """
        event = self._events.get(key)
        if event is None:
            return
        try:
            done = event.query() or event.wait(self._timeout_ns)
        except DeviceError as error:
            if not (error.is_refusal or error.code is DeviceCode.ABANDONED):
                del self._events[key]
                self._on_failure(key)
            raise
        if not done:
            what = "the scratch tile" if key == SCRATCH else f"layer {key}"
            raise DeviceError(
                DeviceCode.TIMEOUT,
                f"request {self._request}: the load of {what} did not end in {self._timeout_ns} "
                "ns; its hot buffer stays taken until it does",
            )
        del self._events[key]

    def settle(self, keys: Iterable[int]) -> None:
        """Wait until loads have ended, well or not: what they touched can be used again.

        Raises: DeviceError when one is not known to have ended.
        """
        for key in keys:
            try:
                self.end(key)
            except DeviceError:
                if key in self._events:
                    raise
