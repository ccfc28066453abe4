"""What one round trip a layer leaves of the bare kernel, and nothing else: for comparison.

The copies of a step by the native queue, four in flight, and for each layer a frame of the size of
an announcement to a server that only answers, and its answer: no books, no slots, no gate. On a
machine of two cores, of which the bare kernel uses both, as fast as a design with such a round trip
can be.
"""

from __future__ import annotations

import tempfile
import time
from array import array
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bench.control import Echo
from bench.layerwise_rig import Rig
from kvd.wire import messages
from kvd.wire.codec import client_codec
from kvd.wire.slot_items import AcquiredItem, SaveItem, SlotItem, WrittenItem
from kvd_kernels.host import CopyQueue

IN_FLIGHT: Final = 4


class Ceiling:
    """An echo, and a queue of copies; `with` ends both."""

    def __init__(self) -> None:
        """Start them."""
        self._scratch = tempfile.TemporaryDirectory()
        self._echo = Echo(Path(self._scratch.name))
        self._queue = CopyQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue.close()
        self._echo.close()
        self._scratch.cleanup()

    def run(self, rig: Rig, threads: int, *, loads: bool) -> float:
        """The copies of a step of the rig, a round trip before each; GB/s."""
        shape = rig.shape
        spans = rig.spans(rig.request(rig.turn(), loads=loads), loads=loads)
        ends = (rig.memory.mapping, rig.pool) if loads else (rig.pool, rig.memory.mapping)
        size = len(spans) // shape.layers
        layers = [array("Q", spans[at : at + size]) for at in range(0, len(spans), size)]
        frame = _announcement(shape.blocks)
        open_copies: deque[int] = deque()
        started = time.perf_counter_ns()
        for layer in layers:
            self._echo.socket.send(frame)
            self._echo.socket.recv()
            if len(open_copies) == IN_FLIGHT:
                self._queue.finish(open_copies.popleft())
            open_copies.append(self._queue.submit(*ends, layer, threads=threads))
        while open_copies:
            self._queue.finish(open_copies.popleft())
        return shape.step_bytes / (time.perf_counter_ns() - started)


def _announcement(blocks: int) -> bytes:
    """A frame as a saved layer has one: the slot is taken, and its rows are announced."""
    save = SaveItem("save", list(range(blocks)), [128] * blocks, ["set0"] * blocks)
    items: list[SlotItem] = [AcquiredItem(0, 1, 0), WrittenItem(0, 1, 0, [save])]
    token = boot_id = bytes(16)
    return client_codec().encode(messages.Events(1, token, 1000, boot_id, 1, 0, items))
