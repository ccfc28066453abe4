"""Log events to a file descriptor without ever waiting for it.

A terminal that is paused with Ctrl-S, or a journal that is slow, must not stop the event loop. The
loop puts events into a bounded queue; one thread turns them into lines and writes them. What does
not fit is dropped and counted, and the count is told with the next line that gets through.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

EVENTS_MAX: Final = 4096
"""Events that wait: about 2 MiB."""

LINE_CHARS_MAX: Final = 8192

_BATCH: Final = 64


class LogEvent(NamedTuple):
    """One event as it was logged; `at` is wall clock, seconds. Fields are not changed any more."""

    at: float
    level: str
    event: str
    fields: dict[str, object]


Render = Callable[[LogEvent], str]


class LogWriter:
    """A bounded queue of events and the thread that writes them."""

    def __init__(
        self,
        fd: int,
        make_render: Callable[[], Render],
        tell_dropped: Callable[[int], LogEvent],
        events_max: int = EVENTS_MAX,
    ) -> None:
        """Start the thread.

        Args:
            fd: where lines go; stays the caller's.
            make_render: called once, in the thread, before the first line; may be slow.
            tell_dropped: makes the event that tells how many were dropped.
            events_max: events that may wait.
        """
        self._fd = fd
        self._make_render = make_render
        self._tell_dropped = tell_dropped
        self._events_max = events_max
        self._events: deque[LogEvent] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._untold = 0
        self._dropped = 0
        # A daemon thread: an output that never takes another byte must not keep kvd alive.
        self._thread = threading.Thread(target=self._run, name="kvd-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Events dropped so far."""
        return self._dropped

    def write(self, event: LogEvent) -> None:
        """Queue one event; drop it when the queue is full."""
        with self._changed:
            if self._closing or len(self._events) >= self._events_max:
                self._drop(1)
                return
            self._events.append(event)
            self._changed.notify()

    def close(self, seconds: float = 1.0) -> bool:
        """Write what is queued, within so many seconds; returns whether all of it was written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _drop(self, count: int) -> None:
        self._dropped += count
        self._untold += count

    def _run(self) -> None:
        render: Render | None = None
        while batch := self._take():
            render = render or self._make_render()
            data = "".join(_line(render(event)) for event in batch)
            if not self._put(data.encode("utf-8", "backslashreplace")):
                # Closed pipe, full disk: there is nobody to tell now, perhaps later.
                with self._changed:
                    self._drop(len(batch))
                    if self._closing:
                        return

    def _take(self) -> list[LogEvent]:
        """Wait for events; empty once closed and nothing is left to tell."""
        with self._changed:
            while not self._events and not self._closing:
                self._changed.wait()
            batch = [self._events.popleft() for _ in range(min(_BATCH, len(self._events)))]
            untold, self._untold = self._untold, 0
        if untold:
            batch.append(self._tell_dropped(untold))
        return batch

    def _put(self, data: bytes) -> bool:
        """Write all bytes; whether that worked."""
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            return False
        return True


def _line(text: str) -> str:
    if len(text) > LINE_CHARS_MAX:
        text = text[: LINE_CHARS_MAX - 3] + "..."
    return f"{text}\n"
