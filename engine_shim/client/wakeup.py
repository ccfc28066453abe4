"""How callers rouse the client's thread: an eventfd that it polls beside its sockets."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Wakeup:
    """A flag with a descriptor; many may set it, one thread waits and clears."""

    def __init__(self) -> None:
        """Not set."""
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    @property
    def fd(self) -> int:
        """Readable while the flag is set; -1 once closed."""
        return self._fd

    def set(self) -> None:
        """Rouse the thread; setting it again, or after `close`, is harmless."""
        # The lock keeps a late caller from writing into whatever got the number of a closed fd.
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget what was set so far; whoever set it has stored what it is about before."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Give the descriptor back; only once nobody polls it. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
