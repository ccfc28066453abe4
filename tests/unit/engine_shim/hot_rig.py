"""A small world of hot buffers, for their unit tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine_shim.device import Device
from engine_shim.device_cpu import CpuDevice
from engine_shim.device_memory import MemfdMemory
from engine_shim.hot import HotBuffers, HotHandle, HotOptions, Plan
from engine_shim.hot_native import NativeBooks
from engine_shim.hot_residency import Residency
from engine_shim.testing import FaultyDevice, Rule
from kvd.plan.layout import RegionLayout

MS = 1_000_000
SECOND = 1_000_000_000
ROW_BYTES = 16
GROUPS = ((0, 1), (2,))


class HotRig:
    """Hot buffers over a region of 3 layers, 20 blocks, 4 tokens each."""

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        layout: RegionLayout | None = None,
        *,
        slots: int = 4,
        timeout_ns: int = 10 * SECOND,
        queue_max: int = 100,
        track_rows: bool = False,
        writes_region: bool = True,
        books: Callable[[int], Residency] | None = None,
        device: Device | None = None,
    ) -> None:
        self.layout = layout or RegionLayout(3, 20, 4, ROW_BYTES)
        cpu = CpuDevice(queue_max=queue_max, submit_timeout_ns=20 * MS)
        self.device: Device = device or cpu
        if rules:
            self.device = FaultyDevice(self.device, rules)
        self.region = MemfdMemory(self.layout.num_bytes, "region")
        options = HotOptions(
            slots,
            8,
            2,
            timeout_ns,
            track_rows=track_rows,
            writes_region=writes_region,
            residency=books or NativeBooks(),
        )
        self.hot = HotBuffers(self.device, self.region.mapping, self.layout, GROUPS, options)
        self.slots = slots

    def open(self, request: str, first: int = 0, tokens: int = 12) -> HotHandle:
        """Open a request on 5 blocks, with `tokens` rows landed."""
        handle = self.hot.open(request, list(range(first, first + 5)))
        for layer in range(3):
            if tokens:
                self.hot.land(handle, layer, 0, self.rows(request, layer, 0, tokens))
        return handle

    def rows(self, request: str, layer: int, start: int, count: int) -> bytes:
        """Rows that say whose they are."""
        size = self.layout.row_bytes
        names = (f"{request} {layer} {it}".encode() for it in range(start, start + count))
        return b"".join(name.ljust(size, b".") for name in names)

    def begin(self, handle: HotHandle, group: int, start: int, count: int = 1) -> None:
        """Begin a step, and append its rows to the first layer of the group."""
        self.hot.begin_step(handle, group, start, start + count)
        self.append(handle, GROUPS[group][0], start, count)

    def append(self, handle: HotHandle, layer: int, start: int, count: int = 1) -> None:
        """Append rows of a step."""
        self.hot.append(handle, layer, start, self.rows(handle.request, layer, start, count))

    def read(self, handle: HotHandle, layer: int, plan: Plan) -> None:
        """Read what a plan selected; all rows must be the request's own."""
        buffer, size = self.hot.buffer_of(handle), self.layout.row_bytes
        hot, tile = self.hot.layout.layer_offset(buffer, layer), None
        for position, place in zip(plan.positions, plan.places, strict=True):
            base = hot
            if place >= self.slots:
                base, place = self.hot.layout.scratch_offset(buffer), place - self.slots
            tile = self.hot.memory.read_bytes(base + place * size, size)
            assert tile == self.rows(handle.request, layer, position, 1)

    def step(self, handle: HotHandle, group: int, start: int, selection: list[int]) -> Plan:
        """One step of one row in all layers of a group."""
        self.begin(handle, group, start)
        plan = self.hot.select(handle, group, [selection])
        for layer in GROUPS[group]:
            if layer != GROUPS[group][0]:
                self.append(handle, layer, start)
            self.hot.ready(handle, layer, plan)
            self.read(handle, layer, plan)
        return plan

    def close(self) -> None:
        assert self.hot.check() == []
        self.hot.shut()
        self.region.close()
        self.device.close(10 * SECOND)
