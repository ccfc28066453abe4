"""What an engine's memory becomes when its main KV is in a decode region of kvd.

On the device stay the indexer's keys of all blocks, and a hot buffer for each sequence that decodes
at a time. The engine's block table stays as it is: a block's index rows are on the device, its main
rows in the region, both at the block's id. So the number of blocks is bounded by both memories.

The engine wants a main cache for each layer. All of them are laid over one another in a few bytes
that nobody reads: a page, and `ALIAS_STRIDE` bytes for each further block.

Pure arithmetic, like `engine_plan`, and made in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from engine_shim.hot_rows import HotLayout
from engine_shim.vllm.engine_plan import INDEXER, MAIN, CacheSpec, EngineShape, layers_of
from engine_shim.vllm.errors import OptionError, PlanError
from engine_shim.vllm.options import PREFIX, ConnectorOptions
from engine_shim.vllm.sparse_options import KEY, SparseOptions
from kvd.plan.layout import SPAN_ALIGN, RegionLayout, align_up

ALIAS_STRIDE: Final = SPAN_ALIGN
WHERE: Final = f"{PREFIX}.{KEY}"
MIB: Final = 1 << 20

Limit = Literal["device memory", "dram_size_per_dp_GB", "num_gpu_blocks_override"]
_DEVICE: Final = "device memory"
_DRAM: Final = "dram_size_per_dp_GB"
_OVERRIDE: Final = "num_gpu_blocks_override"


@dataclass(frozen=True, slots=True)
class SparseShape:
    """What the plan needs to know beside `EngineShape`.

    index_topk: tokens that a query selects in each layer.
    width:      tokens of a decode step: one, and the drafts of speculative decoding.
    """

    index_topk: int
    width: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a cache of the engine lies: byte offset of its block 0, and bytes to the next one."""

    offset: int
    page: int
    block_stride: int


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """Which memory holds what.

    names:        for each layer the engine's caches: (part, name).
    index_pages:  for each layer the bytes of a block of indexer keys, 0 for a layer without.
    groups:       for each indexer layer, it and the layers that follow its selection.
    drafts:       draft layers (MTP), which the engine computes after the others.
    limit:        what bounds the number of blocks.
    stock_blocks: blocks that the same device memory would hold with all KV on it.
    dram_bytes:   of the region at most.
    overlap:      whether attention begins while rows are loaded.
    """

    names: tuple[tuple[tuple[str, str], ...], ...]
    index_pages: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    drafts: tuple[int, ...]
    region: RegionLayout
    hot: HotLayout
    shape: SparseShape
    limit: Limit
    stock_blocks: int
    dram_bytes: int
    keep_device: bool
    overlap: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine, its null block included."""
        return self.region.num_blocks

    @property
    def page(self) -> int:
        """Bytes of one block of a layer's main rows."""
        return self.region.block_tokens * self.region.row_bytes

    def layer_of(self) -> dict[str, int]:
        """Engine name of each main cache -> layer."""
        return {
            name: layer
            for layer, caches in enumerate(self.names)
            for part, name in caches
            if part == MAIN
        }

    def placements(self) -> tuple[dict[str, Placed], int]:
        """Where each cache lies in one allocation, and its bytes."""
        blocks, end = self.num_blocks, 0
        placed: dict[str, Placed] = {}
        for caches, page in zip(self.names, self.index_pages, strict=True):
            pages = {INDEXER: page, **({MAIN: self.page} if self.keep_device else {})}
            for part, name in caches:
                if part in pages:
                    placed[name] = Placed(end, pages[part], pages[part])
                    end = align_up(end + pages[part] * blocks, SPAN_ALIGN)
        if not self.keep_device:
            alias = Placed(end, self.page, ALIAS_STRIDE)
            placed |= dict.fromkeys(self.layer_of(), alias)
            end += self.page + ALIAS_STRIDE * blocks
        return placed, end

    def with_blocks(self, num_blocks: int) -> SparsePlan:
        """The same plan for another number of blocks."""
        return replace(self, region=replace(self.region, num_blocks=num_blocks))


class SparsePlanner:
    """Decides once how an engine uses its memory."""

    def __init__(
        self,
        options: ConnectorOptions,
        shape: EngineShape,
        sparse: SparseShape,
        caches: Sequence[CacheSpec],
    ) -> None:
        """Read the engine's caches.

        Raises: PlanError, OptionError.
        """
        assert options.sparse is not None
        self._options: SparseOptions = options.sparse
        self._shape = shape
        self._sparse = sparse
        _check_alone(options)
        _check_slots(self._options, sparse, shape)
        parts, self._names = layers_of(caches, shape.block_tokens)
        rows = [{part.name: part.row_bytes for part in layer} for layer in parts]
        sizes = {row[MAIN] for row in rows}
        if len(sizes) != 1:
            raise PlanError(
                f"layers have main rows of {sorted(sizes)} bytes; one size is supported"
            )
        self._row_bytes = sizes.pop()
        self._index_pages = tuple(row.get(INDEXER, 0) * shape.block_tokens for row in rows)
        layers = sorted({cache.layer for cache in caches})
        drafts = {cache.layer for cache in caches if cache.is_draft}
        self._drafts = tuple(at for at, layer in enumerate(layers) if layer in drafts)
        self._groups = _groups(self._index_pages, self._names, self._drafts)
        self._hot = HotLayout(
            shape.max_seqs,
            len(self._names),
            self._options.slots,
            scratch_rows(self._options.slots, sparse),
            self._row_bytes,
        )

    @property
    def resident_block_bytes(self) -> int:
        """Device bytes of a block with all of its KV."""
        return self._main_block_bytes + sum(self._index_pages)

    @property
    def _main_block_bytes(self) -> int:
        return len(self._names) * self._row_bytes * self._shape.block_tokens

    @property
    def warning(self) -> str:
        """What to warn of when hot buffers have an unusual size, '' when they have not."""
        slots, step = self._options.slots, self._shape.block_tokens
        advised = -(-2 * self._sparse.index_topk // step) * step
        if slots == advised:
            return ""
        each, count = self._hot.buffer_bytes / MIB, self._hot.num_buffers
        why = (
            "fewer rows stay from one step to the next, so that more are loaded"
            if slots < advised
            else "fewer rows are loaded, and less device memory is left for blocks"
        )
        return (
            f"{WHERE}.topk_buffer_size is {slots}, not about twice index_topk "
            f"({self._sparse.index_topk}): {slots} slots a layer are {each:,.1f} MiB a hot buffer "
            f"and {each * count:,.1f} MiB for {count} sequences; {advised} is a start: {why}"
        )

    def plan(self, device_bytes: int) -> SparsePlan:
        """Choose the number of blocks.

        Args:   device_bytes: memory of one rank for caches and hot buffers.
        Raises: PlanError when not even one sequence fits.
        """
        shape, hot_bytes = self._shape, self._hot.num_bytes
        keep = self._options.keep_device
        per_block = sum(self._index_pages) + (self._main_block_bytes if keep else ALIAS_STRIDE)
        # What rounding may cost is taken off first, and the page that all main caches share.
        page = self._row_bytes * shape.block_tokens
        usable = device_bytes - hot_bytes - page - SPAN_ALIGN * 2 * len(self._names)
        if usable < per_block:
            raise PlanError(
                f"hot buffers of {hot_bytes / MIB:,.1f} MiB leave nothing of the "
                f"{device_bytes / MIB:,.1f} MiB of device memory: lower "
                f"{WHERE}.topk_buffer_size ({self._options.slots}) or max_num_seqs "
                f"({shape.max_seqs}), or give more memory for KV"
            )
        limit: Limit
        blocks, limit = usable // per_block, _DEVICE
        if shape.device_blocks_override:
            blocks, limit = shape.device_blocks_override, _OVERRIDE
        room = self._options.dram_bytes // self._main_block_bytes
        if room < blocks:
            blocks, limit = room, _DRAM
        made = SparsePlan(
            self._names,
            self._index_pages,
            self._groups,
            self._drafts,
            RegionLayout(len(self._names), blocks, shape.block_tokens, self._row_bytes),
            self._hot,
            self._sparse,
            limit,
            device_bytes // self.resident_block_bytes,
            self._options.dram_bytes,
            keep,
            self._options.overlap,
        )
        self._check_length(made)
        return made

    def _check_length(self, made: SparsePlan) -> None:
        shape = self._shape
        need = -(-shape.max_len // shape.block_tokens) + 1  # block 0 is the engine's null block
        if made.num_blocks >= need:
            return
        tokens = max(0, made.num_blocks - 1) * shape.block_tokens
        gib = need * self._main_block_bytes / (1 << 30)
        remedy = {
            _DRAM: f"set {WHERE}.dram_size_per_dp_GB to {gib:.4g} or more",
            _DEVICE: "give more memory for KV, or lower topk_buffer_size or max_num_seqs",
            _OVERRIDE: "raise num_gpu_blocks_override",
        }[made.limit]
        raise PlanError(
            f"one sequence of max_model_len = {shape.max_len} tokens does not fit: {made.limit} "
            f"allows {tokens} tokens; {remedy}, or lower max_model_len"
        )


def scratch_rows(slots: int, sparse: SparseShape) -> int:
    """Rows of a step that may find no slot: its own, and all that its queries select."""
    own, selected = sparse.width, sparse.width * sparse.index_topk
    return min(max(0, own + selected - slots), selected)


def _check_alone(options: ConnectorOptions) -> None:
    if options.offload == "rolling" or options.num_shared is not None:
        key = "offload" if options.offload == "rolling" else "layerwise_num_shared_buffers"
        raise OptionError(
            f"{PREFIX}.{key} shares layer buffers, which is for prefill, and {KEY} is for decode: "
            f"give one of them"
        )


def _check_slots(options: SparseOptions, sparse: SparseShape, shape: EngineShape) -> None:
    if options.slots < sparse.index_topk:
        raise OptionError(
            f"{WHERE}.topk_buffer_size is {options.slots}, fewer than the {sparse.index_topk} rows "
            f"that a query selects (index_topk); give {2 * sparse.index_topk}"
        )
    if options.slots % shape.block_tokens:
        more = -(-options.slots // shape.block_tokens) * shape.block_tokens
        raise OptionError(
            f"{WHERE}.topk_buffer_size is {options.slots}, which is no multiple of the block size "
            f"({shape.block_tokens} tokens); give {more}"
        )


def _groups(
    index_pages: Sequence[int],
    names: Sequence[tuple[tuple[str, str], ...]],
    drafts: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Each indexer layer with the layers that follow its selection.

    Raises: PlanError when the first layer, or a draft layer, has no indexer.
    """
    groups: list[list[int]] = []
    for layer, page in enumerate(index_pages):
        if page:
            groups.append([layer])
        elif groups and layer not in drafts:
            groups[-1].append(layer)
        else:
            name = names[layer][0][1]
            raise PlanError(
                f"{name} has no indexer, and no layer before it whose selection it uses: serve a "
                "model whose first layer and draft layers have one"
            )
    return tuple(map(tuple, groups))
