"""What the service manager hears while kvd runs: that its loop turns, and one line of status."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final

from kvd.memory.sd_notify import notify

STATUS_SECONDS: Final = 0.25
"""Least pause between two texts of status."""

EXTEND_SECONDS: Final = 60
"""Time that a start which makes progress is given beyond each report of it."""

_PINGS_PER_LIMIT: Final = 4


class Heartbeat:
    """Told from the loop that serves engines, so that a loop which hangs falls silent."""

    def __init__(
        self,
        env: Mapping[str, str] = os.environ,
        send: Callable[[str], object] = notify,
    ) -> None:
        """Args: env: WATCHDOG_USEC and WATCHDOG_PID count, as the service manager sets them."""
        self._send = send
        self._is_heard = bool(env.get("NOTIFY_SOCKET"))
        self._pause = _watchdog_seconds(env) / _PINGS_PER_LIMIT
        self._ping_due = 0.0
        self._status_due = 0.0
        self._status = ""
        self._progress = -1

    def beat(self, now: float, status: Callable[[], tuple[str, int | None]]) -> None:
        """Tell what is due.

        Args:
            now: seconds of the loop's clock.
            status: gives the line of status, and while kvd starts how far it has come (any
                number that grows); None once it has started.
        """
        if not self._is_heard:
            return
        if self._pause and now >= self._ping_due:
            self._ping_due = now + self._pause
            self._send("WATCHDOG=1")
        if now < self._status_due:
            return
        self._status_due = now + STATUS_SECONDS
        text, progress = status()
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")
        if progress is not None and progress > self._progress:
            self._progress = progress
            self._send(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1_000_000}")

    def ready(self, text: str) -> None:
        """Tell that kvd has started, with its line of status."""
        self._status = text
        self._send(f"READY=1\nSTATUS={text}")


def _watchdog_seconds(env: Mapping[str, str]) -> float:
    """Return how long kvd may be silent; 0 when nobody minds."""
    limit, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
    if not limit.isdecimal() or pid not in ("", str(os.getpid())):
        return 0.0
    return int(limit) / 1e6
