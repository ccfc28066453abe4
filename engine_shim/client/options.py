"""What a client can be told, and deadlines as it counts them.

Callers give seconds from now; inside, a deadline is a time of the monotonic clock in ns.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields
from typing import Final

SECOND_NS: Final = 1_000_000_000
DEADLINE_S_MAX: Final = 10 * 365 * 86400.0
"""Ten years: so that no sum of deadlines leaves 63 bits."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Deadlines and sizes of one client; each is fixed for its life.

    deadline_s:           of a call that names none.
    connect_deadline_s:   how long the first attach is tried.
    reconnect_deadline_s: how long attaching again is tried; then the client has failed.
    attempt_s:            of one attempt to attach and say hello.
    backoff_min_s:        pause before the second attempt; it doubles each time.
    backoff_max_s:        longest pause between attempts; jitter takes up to half off.
    requests_max:         calls that wait for their reply at once; one more waits for its turn.
    events_max:           slot events that kvd has not acknowledged before new work has to wait.
    event_bytes_max:      the same, bytes.
    window:               batches of slot events under way at once; what comes meanwhile gathers.
    resend_s:             a batch not acknowledged for so long is sent again.
    spin_us:              how long a wait for a slot spins before it sleeps.
    trusted_uids:         users besides root and our own that may serve the socket.
    """

    deadline_s: float = 10.0
    connect_deadline_s: float = 30.0
    reconnect_deadline_s: float = 30.0
    attempt_s: float = 10.0
    backoff_min_s: float = 0.02
    backoff_max_s: float = 0.5
    requests_max: int = 256
    events_max: int = 8192
    event_bytes_max: int = 64 << 20
    window: int = 1
    resend_s: float = 2.0
    spin_us: int = 50
    trusted_uids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "spin_us" else 1
            if field.name.endswith("_s"):
                end_after(value, field.name)
                if value == 0:
                    raise ValueError(f"{field.name} must be more than 0 seconds")
            elif field.name != "trusted_uids" and value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")
        if self.backoff_min_s > self.backoff_max_s:
            raise ValueError("backoff_min_s must not be more than backoff_max_s")


def end_after(deadline_s: float, name: str = "deadline_s") -> int:
    """The clock when so many seconds have passed.

    Raises: ValueError: not a number of seconds from 0 to `DEADLINE_S_MAX`.
    """
    if not math.isfinite(deadline_s) or not 0 <= deadline_s <= DEADLINE_S_MAX:
        raise ValueError(f"{name} must be 0 to {DEADLINE_S_MAX:.0f} seconds, got {deadline_s}")
    return time.monotonic_ns() + int(deadline_s * SECOND_NS)


def left_ns(end: int) -> int:
    """Nanoseconds until then, at least 0."""
    return max(0, end - time.monotonic_ns())


def left_s(end: int) -> float:
    """Seconds until then, at least 0."""
    return left_ns(end) / SECOND_NS


def left_ms(end: int) -> int:
    """Milliseconds until then, rounded up, at least 0."""
    return -(-left_ns(end) // 1_000_000)
