"""Hot buffers beside a dumb dictionary of what every row's bytes are.

Time is virtual and copies are torn until they end, so a row that is read too early, or that a late
load overwrites, differs from the dictionary. Loads can be made to fail or to hang.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from engine_shim.device import DeviceCode, DeviceError
from engine_shim.device_memory import MemfdMemory
from engine_shim.hot import HoleError, HotBuffers, HotHandle, HotOptions, NoHotBufferError, Plan
from engine_shim.hot_lending import has_ended
from engine_shim.hot_residency import ClockResidency, Residency
from engine_shim.testing import Fail, FaultyDevice, Hang, Link, OpInfo, Rule, VirtualDevice
from kvd.plan.layout import RegionLayout

GROUPS = ((0, 1), (2,))
LAYERS = 3
BLOCK_TOKENS = 2
BLOCKS_EACH = 12
MAX_TOKENS = BLOCK_TOKENS * BLOCKS_EACH
REQUESTS = ("a", "b", "c")
SLOT_COUNTS = (2, 4, 5)
WIDTH_MAX = 3
SCRATCH = 10
ROW = struct.Struct("=QQ")
TIMEOUT_NS = 1_000_000


@dataclass
class Model:
    """What a request must read: for each layer, position -> bytes; and what may be hot."""

    handle: HotHandle
    rows: list[dict[int, bytes]] = field(default_factory=lambda: [{} for _ in range(LAYERS)])
    hot: list[set[int]] = field(default_factory=lambda: [set() for _ in GROUPS])
    is_preempted: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens whose rows are written in all layers."""
        return len(self.rows[LAYERS - 1])


class HotWorld:
    """Every method acts on the buffers and the model, and asserts that they agree."""

    def __init__(self, slots: int, books: Callable[[int], Residency] = ClockResidency) -> None:
        self.slots = slots
        layout = RegionLayout(LAYERS, BLOCKS_EACH * len(REQUESTS), BLOCK_TOKENS, ROW.size)
        self.clock = VirtualDevice({"hot": Link("hot", 1_000_000_000)})
        self.trouble = ""
        rules = (
            Rule(Fail(moved=0.5), kind="copy", when=lambda op: self._wants("fail", op)),
            Rule(Hang(), kind="copy", when=lambda op: self._wants("hang", op)),
        )
        self.device = FaultyDevice(self.clock, rules)
        self.region = MemfdMemory(layout.num_bytes, "region")
        options = HotOptions(slots, SCRATCH, num_buffers=2, timeout_ns=TIMEOUT_NS, residency=books)
        self.hot = HotBuffers(self.device, self.region.mapping, layout, GROUPS, options)
        self.open: dict[str, Model] = {}
        self.serial = 0
        self.is_hung = False
        self.loading: set[int] = set()

    def close(self) -> None:
        """End; whatever hangs goes on first."""
        self.resume_stream()
        for name in list(self.open):
            self.close_request(name)
        figures = self.hot.statistics()
        assert (figures.free, figures.parked) == (2, 0), "a buffer is lost"
        self.hot.shut()
        self.region.close()

    def check(self) -> None:
        """Both tables of every buffer say the same."""
        assert self.hot.check() == []

    # Requests ---------------------------------------------------------------------------------

    def open_request(self, name: str) -> None:
        """Open a request if a buffer is free; its blocks were another request's before."""
        first = REQUESTS.index(name) * BLOCKS_EACH
        blocks = list(range(first, first + BLOCKS_EACH))
        blocks.reverse()
        try:
            handle = self.hot.open(name, blocks)
        except NoHotBufferError:
            assert self.hot.statistics().free == 0
            return
        self.open[name] = Model(handle)
        self.check_lent(self.open[name])

    def close_request(self, name: str) -> None:
        """Close a request."""
        model = self.open.pop(name)
        self.note_loads(model)
        self.hot.close(model.handle)

    def preempt(self, name: str) -> None:
        """Take a request's buffer."""
        model = self.open[name]
        self.note_loads(model)
        self.hot.preempt(model.handle)
        model.is_preempted = True
        model.hot = [set() for _ in GROUPS]

    def resume(self, name: str) -> None:
        """Give a request a buffer again, if one is free."""
        model = self.open[name]
        try:
            self.hot.resume(model.handle)
        except NoHotBufferError:
            assert self.hot.statistics().free == 0
            return
        model.is_preempted = False
        self.check_lent(model)

    def note_loads(self, model: Model) -> None:
        """Note a buffer that is given back while a load into it hangs."""
        if model.is_preempted or not self.is_hung:
            return
        events = [self.hot.load_event(model.handle, layer) for layer in range(LAYERS)]
        if any(event is not None and not has_ended(event) for event in events):
            self.loading.add(self.hot.buffer_of(model.handle))

    def check_lent(self, model: Model) -> None:
        """Nobody else may still write into a buffer that was just lent."""
        assert self.hot.buffer_of(model.handle) not in self.loading, "lent while a load runs"

    def truncate(self, name: str, num_tokens: int) -> None:
        """Void rows."""
        model = self.open[name]
        self.hot.truncate(model.handle, num_tokens)
        for rows in model.rows:
            for position in [it for it in rows if it >= num_tokens]:
                del rows[position]
        model.hot = [{it for it in hot if it < num_tokens} for hot in model.hot]
        for group in () if model.is_preempted else range(len(GROUPS)):
            for position in range(num_tokens, MAX_TOKENS):
                assert not self.is_resident(model, group, position), "a rejected row is hot"

    def land(self, name: str, count: int, again: int = 0) -> None:
        """Rows come from elsewhere; the last `again` ones are there already."""
        model = self.open[name]
        start = max(0, model.num_tokens - again)
        for layer in range(LAYERS):
            try:
                self.hot.land(model.handle, layer, start, self.new_rows(model, layer, start, count))
            except DeviceError:
                self.must_be_hung()
                self.truncate(name, start)
                return
        model.hot = [{it for it in hot if it < start} for hot in model.hot]

    def new_rows(self, model: Model, layer: int, start: int, count: int) -> bytes:
        """Make rows that were never seen before, and note them."""
        made = []
        for position in range(start, start + count):
            self.serial += 1
            row = ROW.pack(self.serial, layer << 32 | position)
            model.rows[layer][position] = row
            made.append(row)
        return b"".join(made)

    # Steps ------------------------------------------------------------------------------------

    def step(self, name: str, width: int, picks: Sequence[Sequence[int]], stop_at: int) -> None:
        """Decode one step of `width` rows; each query selects picks modulo what it may see.

        stop_at: the layer before which the engine gives up, LAYERS for none.
        """
        model = self.open[name]
        start = model.num_tokens
        width = min(width, MAX_TOKENS - start)
        if width < 1:
            return
        selections = [
            [pick % (start + query + 1) if pick >= 0 else -1 for pick in picks[query]]
            for query in range(width)
        ]
        try:
            for layer in range(min(LAYERS, stop_at)):
                self.layer(model, layer, start, width, selections)
        except DeviceError as error:
            if error.code is not DeviceCode.INJECTED:
                self.must_be_hung()
            stop_at = 0
        if stop_at < LAYERS:
            self.truncate(name, start)

    def layer(
        self, model: Model, layer: int, start: int, width: int, selections: list[list[int]]
    ) -> None:
        """One layer of a step; its rows must be those of the dictionary."""
        group = next(at for at, layers in enumerate(GROUPS) if layer in layers)
        is_first = layer == GROUPS[group][0]
        if is_first:
            self.hot.begin_step(model.handle, group, start, start + width)
        rows = self.new_rows(model, layer, start, width)
        self.hot.append(model.handle, layer, start, rows)
        if is_first:
            self.plan = self.select(model, group, start, width, selections)
        self.hot.ready(model.handle, layer, self.plan)
        self.compare(model, layer, self.plan)

    def select(
        self, model: Model, group: int, start: int, width: int, selections: list[list[int]]
    ) -> Plan:
        """Select, and hold the plan against what is known without the books."""
        fresh = set(range(start, start + width))
        plan = self.hot.select(model.handle, group, selections)
        given = [it for selection in selections for it in selection if it >= 0]
        misses = {position for position, _ in plan.misses}
        hits = set(plan.positions) - misses - set(plan.scratch)
        assert list(plan.positions) == sorted(set(given))
        assert plan.num_given == len(given)
        assert len(set(plan.places)) == len(plan.places), "two rows share a place"
        assert hits <= model.hot[group] | fresh, "a hit was never loaded"
        assert not misses & fresh, "a row of this step is missed"
        placed = {it for it in fresh if self.is_resident(model, group, it)}
        assert len(placed) == min(width, self.slots), "a row of this step got no slot"
        if set(plan.scratch) - fresh:
            assert len(hits | misses | placed) == self.slots, "scratch while a slot was free"
        model.hot[group] |= misses | placed
        return plan

    def is_resident(self, model: Model, group: int, position: int) -> bool:
        """Whether the books say that a row is in a slot."""
        return self.hot.slot_of(model.handle, group, position) >= 0

    def compare(self, model: Model, layer: int, plan: Plan) -> None:
        """Read every selected row where the plan says it is."""
        buffer = self.hot.buffer_of(model.handle)
        hot = self.hot.layout.layer_offset(buffer, layer)
        tile = self.hot.layout.scratch_offset(buffer)
        for position, place in zip(plan.positions, plan.places, strict=True):
            base, index = (hot, place) if place < self.slots else (tile, place - self.slots)
            row = self.hot.memory.read_bytes(base + index * ROW.size, ROW.size)
            expected = model.rows[layer][position]
            assert row == expected, f"layer {layer} position {position}: {row!r} != {expected!r}"

    def read_hole(self, name: str, beyond: int) -> None:
        """Select a row that was never written: refused, and nothing changes."""
        model = self.open[name]
        start = model.num_tokens
        if start >= MAX_TOKENS:
            return
        before = self.hot.statistics()
        try:
            self.hot.begin_step(model.handle, 1, start, start + 1)
        except DeviceError:
            self.must_be_hung()
            return
        # The step's own row is not written yet either.
        with pytest.raises(HoleError) as caught:
            self.hot.select(model.handle, 1, [[start + beyond]])
        assert caught.value.position == start + beyond
        after = self.hot.statistics()
        assert after.holes == before.holes + 1
        assert after.rows.selected == before.rows.selected
        self.truncate(name, start)

    # Faults -----------------------------------------------------------------------------------

    def resume_stream(self) -> None:
        """Let a hanging stream go on."""
        self.trouble = ""
        self.device.resume("hot")
        self.is_hung = False
        assert self.clock.run_until_idle(TIMEOUT_NS)
        self.loading.clear()

    def must_be_hung(self) -> None:
        """A load did not end: the stream must hang."""
        assert self.is_hung, "a load did not end although the stream runs"

    def _wants(self, what: str, op: OpInfo) -> bool:
        if self.trouble != what:
            return False
        self.trouble = ""
        self.is_hung = self.is_hung or what == "hang"
        return True
