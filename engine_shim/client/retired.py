"""Memory of an earlier life of kvd: unmapped as soon as nothing of this process uses it.

`Mapping.close` waits for copies in flight, so it runs on a thread of its own; a mapping with live
views cannot be closed and is tried again later. The memory is void meanwhile, but never unmapped
under a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvd_kernels.host import Mapping


class RetiredMappings:
    """Mappings to be closed."""

    def __init__(self) -> None:
        """None."""
        self._lock = threading.Lock()
        self._waiting: list[Mapping] = []
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting)

    def add(self, mappings: Iterable[Mapping]) -> None:
        """Close these, and whatever could not be closed before, without waiting for it."""
        thread = threading.Thread(target=self._close_all, name="kvd-client-unmap", daemon=True)
        with self._lock:
            self._waiting.extend(mappings)
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)
        thread.start()

    def _close_all(self) -> None:
        with self._lock:
            mine, self._waiting = self._waiting, []
        for mapping in mine:
            try:
                mapping.close()
            except BufferError:
                # A view is alive: the next loss, or the end of the client, tries again.
                with self._lock:
                    self._waiting.append(mapping)

    def finish(self) -> None:
        """Try everything once more and wait for copies in flight to end."""
        self.add(())
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()
