"""Native decode steps beside a dumb dictionary of every row and key, and sums written out in numpy.

Keys and index queries are small whole numbers, so scores are exact and the selection is defined to
the last tie. Rows are drawn anew each time one is written: a row that is read from a wrong slot, or
before it was copied, changes the attention by far more than it may differ by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_shim.device import DeviceCode, DeviceError
from engine_shim.device_memory import MemfdMemory
from engine_shim.hot import HotBuffers, HotHandle, HotOptions, NoHotBufferError
from engine_shim.hot_residency import HotStatistics
from engine_shim.hot_steps import HotSteps
from engine_shim.sparse_ops import Floats, KeyRows, StepSizes
from engine_shim.testing import Fail, FaultyDevice, Rule, VirtualDevice
from kvd.plan.layout import RegionLayout
from kvd_kernels.residency_reference import top_k
from kvd_kernels.rows_reference import TOLERANCE, index_scores

GROUPS = ((0, 1), (2,))
LAYERS = 3
BLOCK_TOKENS = 2
BLOCKS_EACH = 10
MAX_TOKENS = BLOCK_TOKENS * BLOCKS_EACH
REQUESTS = ("a", "b", "c")
SLOT_COUNTS = (3, 6, 11)
WIDTH_MAX = 3
TOPK = 4
HEADS, ROW, VALUE = 2, 16, 8
KEY_HEADS, KEY = 2, 4
TIMEOUT_NS = 1_000_000
NUM_BLOCKS = BLOCKS_EACH * len(REQUESTS)


class Broken(Exception):
    """The step ends here."""


class Injected(Exception):
    """A copy failed as it was told to."""


@dataclass
class Model:
    """What a request's rows and keys are, by layer and by group."""

    handle: HotHandle
    blocks: list[int]
    rows: list[dict[int, Floats]] = field(default_factory=lambda: [{} for _ in range(LAYERS)])
    keys: list[dict[int, Floats]] = field(default_factory=lambda: [{} for _ in GROUPS])
    is_preempted: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens whose rows are written in all layers."""
        return len(self.rows[-1])


class StepsWorld:
    """Every method acts on the buffers and the model, and asserts that they agree."""

    def __init__(
        self,
        slots: int,
        *,
        writes_region: bool = True,
        seed: int = 0,
        rules: Sequence[Rule] = (),
    ) -> None:
        self.slots, self.draw = slots, np.random.default_rng(seed)
        self.layout = RegionLayout(LAYERS, NUM_BLOCKS, BLOCK_TOKENS, 4 * ROW)
        self.fails = False
        rule = Rule(Fail(), kind="host", when=lambda _: self._takes_failure())
        self.clock = VirtualDevice({})
        self.device = FaultyDevice(self.clock, (rule, *rules))
        self.region = MemfdMemory(self.layout.num_bytes, "region")
        self.keys = np.zeros((len(GROUPS), NUM_BLOCKS, BLOCK_TOKENS, KEY), np.float32)
        self.sizes = StepSizes(
            queries=WIDTH_MAX,
            selected=TOPK,
            context=MAX_TOKENS,
            heads=HEADS,
            row_floats=ROW,
            value_floats=VALUE,
            index_heads=KEY_HEADS,
            index_floats=KEY,
            element="float32",
            index_element="float32",
        )
        options = HotOptions(
            slots,
            WIDTH_MAX * TOPK,
            num_buffers=2,
            timeout_ns=TIMEOUT_NS,
            writes_region=writes_region,
        )
        self.hot = HotBuffers(self.device, self.region.mapping, self.layout, GROUPS, options)
        memory = self.hot.memory
        assert isinstance(memory, MemfdMemory)
        block = BLOCK_TOKENS * KEY * 4
        self.key_rows = KeyRows(self.keys, NUM_BLOCKS * block, block, KEY * 4)
        self.steps: HotSteps | None = HotSteps(
            self.device,
            self.hot,
            self.region.mapping.view(),
            self.layout,
            memory.mapping.view(),
            self.key_rows,
            self.sizes,
        )
        self.writes_region = writes_region
        self.open: dict[str, Model] = {}

    def close(self) -> None:
        """End; no buffer is lost."""
        for name in list(self.open):
            self.close_request(name)
        self.clock.run_until_idle(TIMEOUT_NS)
        figures = self.hot.statistics()
        assert (figures.free, figures.parked) == (2, 0), "a buffer is lost"
        assert self.steps is not None
        self.steps.close(TIMEOUT_NS)
        self.steps = None
        self.hot.shut()
        self.region.close()

    def check(self) -> None:
        """Both tables of every buffer say the same."""
        assert self.hot.check() == []

    def open_request(self, name: str, prompt: int) -> None:
        """Open a request with rows of a prompt, if a buffer is free."""
        first = REQUESTS.index(name) * BLOCKS_EACH
        blocks = self.draw.permutation(np.arange(first, first + BLOCKS_EACH)).tolist()
        try:
            handle = self.hot.open(name, blocks)
        except NoHotBufferError:
            assert self.hot.statistics().free == 0
            return
        model = self.open[name] = Model(handle, blocks)
        for layer in range(LAYERS if prompt else 0):
            rows = self._new_rows(model, layer, 0, prompt)
            self.hot.land(handle, layer, 0, rows.view(np.uint8).data)
        for group in range(len(GROUPS)):
            self._new_keys(model, group, 0, prompt)

    def close_request(self, name: str) -> None:
        """Close a request."""
        self.hot.close(self.open.pop(name).handle)

    def preempt(self, name: str) -> None:
        """Take a request's buffer."""
        self.hot.preempt(self.open[name].handle)
        self.open[name].is_preempted = True

    def resume(self, name: str) -> None:
        """Give a request a buffer again, if one is free."""
        try:
            self.hot.resume(self.open[name].handle)
        except NoHotBufferError:
            assert self.hot.statistics().free == 0
            return
        self.open[name].is_preempted = False

    def truncate(self, name: str, num_tokens: int) -> None:
        """Void rows."""
        model = self.open[name]
        self.hot.truncate(model.handle, num_tokens)
        for known in (*model.rows, *model.keys):
            for position in [it for it in known if it >= num_tokens]:
                del known[position]

    def step(
        self, name: str, width: int, *, again: int, ordered: bool, stop_at: int = 2 * LAYERS
    ) -> None:
        """Run a step of `width` rows, the first `again` of which are there already.

        stop_at: calls of choose and attend before it breaks off.
        """
        model = self.open[name]
        start = model.num_tokens - min(again, model.num_tokens)
        end = min(start + width, MAX_TOKENS)
        if start == end:
            return
        self.calls_left = stop_at
        before = model.num_tokens
        try:
            for layer in range(LAYERS):
                self._layer(model, layer, start, end, ordered=ordered)
        except (Broken, Injected):
            self.truncate(name, min(before, start))

    # What a step does -------------------------------------------------------------------------

    def _layer(self, model: Model, layer: int, start: int, end: int, *, ordered: bool) -> None:
        group, steps = self.hot.group_of[layer], self.steps
        assert steps is not None
        is_first = layer == GROUPS[group][0]
        if is_first:
            steps.begin_step(model.handle, group, start, end)
            self._new_keys(model, group, start, end)
        rows = self._new_rows(model, layer, start, end)
        steps.append(model.handle, layer, start, rows.view(np.uint8))
        if not self.writes_region:
            self._write_region(model, layer, start, rows)
        if is_first:
            self._count_call()
            self._choose(model, group, start, end, ordered=ordered)
        self._count_call()
        queries = self.draw.standard_normal((end - start, HEADS, ROW)).astype(np.float32)
        found = self._attend(steps, model.handle, layer, queries)
        most = max(np.abs(row).max() for row in model.rows[layer].values())
        for at, selected in enumerate(self.chosen):
            values = np.stack([model.rows[layer][it] for it in selected.tolist()])
            expected = attention(queries[at], values)
            assert np.abs(found[at] - expected).max() <= 2 * TOLERANCE * most

    @staticmethod
    def _attend(steps: HotSteps, handle: HotHandle, layer: int, queries: Floats) -> Floats:
        try:
            return steps.attend(handle, layer, queries)
        except DeviceError as error:
            if error.code is DeviceCode.INJECTED:
                raise Injected from error
            raise

    def _choose(self, model: Model, group: int, start: int, end: int, *, ordered: bool) -> None:
        assert self.steps is not None
        shape = (end - start, KEY_HEADS, KEY)
        queries = self.draw.integers(-3, 4, shape).astype(np.float32)
        weights = self.draw.integers(-2, 3, shape[:2]).astype(np.float32)
        known = model.keys[group]
        keys = np.stack([known[it] for it in range(end)])
        self.chosen = [
            top_k(index_scores(queries[at], weights[at], keys[: start + at + 1]), TOPK)
            for at in range(end - start)
        ]
        expected = self._expected(model, group)
        before = self.hot.rows_of(model.handle)[group]
        self.steps.choose(model.handle, group, queries, weights, ordered=ordered)
        counted = self.hot.rows_of(model.handle)[group] - before
        assert (counted.selected, counted.merged, counted.hits) == expected
        distinct = counted.selected - counted.merged
        assert counted.misses + counted.scratch == distinct - counted.hits

    def _expected(self, model: Model, group: int) -> tuple[int, int, int]:
        """What a selection counts: positions, repeats, and hits of distinct ones."""
        selected = [it for row in self.chosen for it in row.tolist()]
        distinct = set(selected)
        hits = sum(self.hot.slot_of(model.handle, group, it) >= 0 for it in distinct)
        return len(selected), len(selected) - len(distinct), hits

    def _new_rows(self, model: Model, layer: int, start: int, end: int) -> Floats:
        rows = self.draw.standard_normal((end - start, ROW)).astype(np.float32)
        model.rows[layer].update(zip(range(start, end), rows, strict=True))
        return rows

    def _new_keys(self, model: Model, group: int, start: int, end: int) -> None:
        for position in range(start, end):
            key = self.draw.integers(-2, 3, KEY).astype(np.float32)
            model.keys[group][position] = key
            block = model.blocks[position // BLOCK_TOKENS]
            self.keys[group, block, position % BLOCK_TOKENS] = key

    def _write_region(self, model: Model, layer: int, start: int, rows: Floats) -> None:
        """Be the rank that writes."""
        for at, row in enumerate(rows):
            block, within = divmod(start + at, BLOCK_TOKENS)
            offset = self.layout.row_offset(layer, model.blocks[block], within)
            self.region.write_bytes(offset, row.tobytes())

    def _count_call(self) -> None:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise Broken

    def _takes_failure(self) -> bool:
        failing, self.fails = self.fails, False
        return failing

    def statistics(self) -> HotStatistics:
        """Return the counts so far."""
        return self.hot.statistics().rows


def attention(queries: Floats, rows: Floats) -> NDArray[np.float64]:
    """Return the weighted values [H, L] of queries [H, R] over rows [N, R]."""
    scores = queries.astype(np.float64) @ rows.T.astype(np.float64)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    mixed: NDArray[np.float64] = (shares / shares.sum(axis=1, keepdims=True)) @ rows[:, :VALUE]
    return mixed
