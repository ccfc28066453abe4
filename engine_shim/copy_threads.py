"""The threads that move layers between slots and the pool, beside the compute thread.

*Loader* (`loader.py`): takes each layer's slot in order, `lookahead` layers ahead of compute, and
loads what it lacks. *Saver* (`saver.py`): saves layers that were announced: only kvd knows whether
the target blocks are still this request's. Both need kvd's yes, to the step or else to the layer.
Where it has come, the thread that asks begins the copy, else the one that hears it; these threads
take what has to wait. The ends of copies are told to kvd by notifications of the streams, in their
order: that only posts slot events, and waits for nobody.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from engine_shim.device import Device


class WorkThread:
    """A thread that does what it is handed, in order, until it is closed."""

    def __init__(self, name: str, device: Device) -> None:
        """Start it; the device is bound to it first."""
        self._device = device
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Hand over one piece of work; bounded by the layers of the running steps."""
        self._queue.put(work)

    def close(self, seconds: float) -> bool:
        """End after what was handed over; returns whether it ended in time."""
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._device.bind_thread()
        while (work := self._queue.get()) is not None:
            work()


class BusyTime:
    """How long a stream of copies was busy: overlapping waits in its queue count once.

    Used by one thread that submits and one that hears the ends, in the same order.
    """

    def __init__(self) -> None:
        """Nothing was copied."""
        self._last_end = 0
        self.busy_ns = 0

    def ended(self, submitted: int) -> None:
        """A copy that was submitted at this time (monotonic, ns) has ended now."""
        now = time.monotonic_ns()
        self.busy_ns += now - max(submitted, self._last_end)
        self._last_end = now
