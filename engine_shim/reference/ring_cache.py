"""A prefill cache whose layers take turns in a few buffers."""

from __future__ import annotations

from torch import Tensor

from engine_shim.pipeline import PrefillPipeline
from engine_shim.reference.cache import BlockTable, PagedView
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.layouts import INDEXER, MAIN, rows_tensor
from kvd.wire.layout import DeviceLayout


class SlotTensors:
    """The slots' memory as tensors of rows, one for each slot and part."""

    def __init__(self, config: ModelConfig, layout: DeviceLayout, view: memoryview) -> None:
        """view: the memory that holds the slots; kept alive by the tensors."""
        rows = layout.num_blocks * layout.block_tokens
        self.num_blocks = layout.num_blocks
        self.block_tokens = layout.block_tokens
        self._tensors = {
            (slot, area.part): rows_tensor(
                view,
                offset + area.offset,
                rows,
                area.row_bytes,
                config.index_storage if area.part == INDEXER else config.dtype,
            )
            for slot, (offset, kind) in enumerate(
                zip(layout.slot_offsets, layout.slot_kinds, strict=True)
            )
            for area in layout.kinds[kind]
        }

    def rows(self, slot: int, part: str) -> Tensor:
        """[num_blocks * block_tokens, row]."""
        return self._tensors[slot, part]


class RingCache:
    """`KvCache` of one request over a `PrefillPipeline`; see `cache.py` for the calls.

    Between `begin_layer` and `end_layer` the layer's rows [0, tokens so far) are in its slot.
    """

    def __init__(self, pipeline: PrefillPipeline, tensors: SlotTensors, table: BlockTable) -> None:
        """table: the request's device blocks."""
        self._pipeline = pipeline
        self._tensors = tensors
        self._table = table
        self._slot = -1

    def begin_layer(self, layer: int) -> None:
        """Wait until the layer's slot may be written and holds the rows before this step."""
        self._slot = self._pipeline.before_write(layer)

    def write(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        """Store the step's rows in the slot."""
        self._view(MAIN).write(positions, main)
        if index is not None:
            self._view(INDEXER).write(positions, index)

    def end_write(self, layer: int) -> None:
        """Announce the rows: saves and remote reads may start."""
        self._pipeline.written(layer)

    def index_keys(self, layer: int, num_tokens: int) -> Tensor:
        """Index keys of positions [0, num_tokens)."""
        return self._view(INDEXER).prefix(num_tokens)

    def selected(self, layer: int, positions: Tensor) -> None:
        """Do nothing: the slot holds every row of its layer."""

    def gather(self, layer: int, selected: Tensor) -> Tensor:
        """Rows by position."""
        return self._view(MAIN).gather(selected)

    def end_layer(self, layer: int) -> None:
        """Let go of the slot."""
        self._pipeline.computed(layer)
        self._slot = -1

    def truncate(self, num_tokens: int) -> None:
        """Refuse: a prefill engine drafts nothing."""
        raise ValueError("a prefill cache holds no drafts; decode elsewhere")

    def _view(self, part: str) -> PagedView:
        return PagedView(self._tensors.rows(self._slot, part), self._table)
