"""What an engine's device memory becomes: which layer lives in which buffer, and how much fits.

Pure arithmetic over the caches that the engine declares; `adapter` reads them from vLLM and writes
the placement back. The plan is made once, where the engine plans its block count, and travels to
the workers with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from engine_shim.ring import device_layout
from engine_shim.vllm.errors import OptionError, PlanError
from engine_shim.vllm.options import PREFIX, ConnectorOptions
from kvd.plan.layout import BlockLayout
from kvd.plan.ring import PartsOfLayer, RingPlan, plan_ring
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, Part

MAIN: Final = "main"
INDEXER: Final = "indexer"

ROLLING_DEFAULT: Final = 3
"""Shared buffers of `offload = rolling` when their number is not given."""

Mode = Literal["resident", "rolling"]
Limit = Literal["device memory", "pool bytes", "num_gpu_blocks_override"]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache that the engine declares.

    name:       its name in the engine, e.g. `model.layers.3.self_attn.attn`.
    layer:      physical layer that it belongs to.
    part:       main, or indexer (keys of the sparse indexer).
    page_bytes: bytes of one block.
    rows:       whether tokens lie one after another in a block; else its interior is opaque.
    is_draft:   of a draft (MTP) layer: its rows depend on tokens beyond their own.
    """

    name: str
    layer: int
    part: str
    page_bytes: int
    rows: bool
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What the plan needs to know of an engine beside its caches.

    block_tokens:  tokens of a block.
    shards:        ranks that hold different bytes of a block (MLA: 1).
    max_len:       longest sequence; max_seqs: sequences at once.
    device_blocks_override: number of blocks that the user demands, 0 for none.
    """

    model: str
    dtype: str
    block_tokens: int
    shards: int
    max_len: int
    max_seqs: int
    device_blocks_override: int = 0


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The ring of an engine, and how many blocks it may have.

    names:        for each layer of the ring the engine's caches: (part, name).
    mode, why:    resident or rolling, and the reason in a sentence.
    limit:        what bounds the number of blocks.
    stock_blocks: blocks that the same memory would hold without reuse.
    pool_blocks:  blocks of the pool.
    draft_layers: layers of the ring that may be skipped by a step.
    """

    ring: RingPlan
    names: tuple[tuple[tuple[str, str], ...], ...]
    layout: BlockLayoutSpec
    mode: Mode
    why: str
    limit: Limit
    stock_blocks: int
    pool_blocks: int
    opaque: bool
    draft_layers: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Device blocks; every buffer has room for all of them."""
        return self.ring.num_blocks

    def device(self) -> tuple[DeviceLayout, int]:
        """Where the buffers lie in one allocation, and its bytes."""
        return device_layout(self.ring)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the largest buffer that layers share; 0 when none do."""
        shared = [at for at, slot in enumerate(self.ring.slots) if not slot.bound]
        return max((self.ring.bytes_of(at) for at in shared), default=0)

    def layer_of(self) -> dict[str, int]:
        """Engine name of each main cache -> layer of the ring."""
        return {
            name: layer
            for layer, caches in enumerate(self.names)
            for part, name in caches
            if part == MAIN
        }

    def placements(self, slot_of: Sequence[int] | None = None) -> dict[str, tuple[int, int]]:
        """Engine name of each cache -> (byte offset of its block 0, bytes of a block)."""
        layout, _ = self.device()
        placed = {}
        for caches, slot in zip(self.names, slot_of or self.ring.slot_of, strict=True):
            areas = {area.part: area for area in layout.kinds[layout.slot_kinds[slot]]}
            for part, name in caches:
                offset = layout.slot_offsets[slot] + areas[part].offset
                placed[name] = offset, areas[part].row_bytes * layout.block_tokens
        return placed

    def with_blocks(self, num_blocks: int) -> EnginePlan:
        """The same plan for another number of blocks."""
        return replace(self, ring=replace(self.ring, num_blocks=num_blocks))


def layers_of(
    caches: Iterable[CacheSpec], block_tokens: int
) -> tuple[tuple[PartsOfLayer, ...], tuple[tuple[tuple[str, str], ...], ...]]:
    """Caches by physical layer, in the order of layers: (parts of each, names of each).

    Raises: PlanError for a layer with two caches of one part, or a block that is no whole rows.
    """
    grouped: dict[int, dict[str, CacheSpec]] = defaultdict(dict)
    for cache in caches:
        other = grouped[cache.layer].setdefault(cache.part, cache)
        if other is not cache:
            raise PlanError(
                f"layer {cache.layer} has two caches of part {cache.part}: {other.name} and "
                f"{cache.name}; such models are not supported"
            )
        if cache.page_bytes % block_tokens:
            raise PlanError(
                f"{cache.name} has blocks of {cache.page_bytes} bytes for {block_tokens} tokens: "
                "padded pages are not supported"
            )
    parts, names = [], []
    for _, layer in sorted(grouped.items()):
        if MAIN not in layer:
            raise PlanError(f"{next(iter(layer.values())).name} has no main cache beside it")
        ordered = [layer[part] for part in (MAIN, INDEXER) if part in layer]
        parts.append(tuple(Part(one.part, one.page_bytes // block_tokens) for one in ordered))
        names.append(tuple((one.part, one.name) for one in ordered))
    if not parts:
        raise PlanError("the model has no KV cache")
    return tuple(parts), tuple(names)


def block_bytes(ring: RingPlan) -> int:
    """Device bytes that one more block takes in all buffers of a ring."""
    return sum(part.row_bytes for slot in ring.slots for part in slot.parts) * ring.block_tokens


@dataclass(frozen=True, slots=True)
class _Fit:
    """One way to use the memory: its ring, and how many blocks it gets, and why not more."""

    ring: RingPlan
    blocks: int
    limit: Limit


class EnginePlanner:
    """Decides once how an engine uses its memory."""

    def __init__(
        self, options: ConnectorOptions, shape: EngineShape, caches: Sequence[CacheSpec]
    ) -> None:
        """Read the engine's caches.

        Raises: PlanError, OptionError.
        """
        self._options = options
        self._shape = shape
        self._parts, self._names = layers_of(caches, shape.block_tokens)
        layers = sorted({cache.layer for cache in caches})
        drafts = {cache.layer for cache in caches if cache.is_draft}
        self._drafts = tuple(at for at, layer in enumerate(layers) if layer in drafts)
        self._opaque = not all(cache.rows for cache in caches)
        self.layout = BlockLayoutSpec(
            shape.model,
            shape.dtype,
            shape.block_tokens,
            [list(parts) for parts in self._parts],
            shape.shards,
        )

    @property
    def num_layers(self) -> int:
        """Cache-bearing layers."""
        return len(self._parts)

    @property
    def resident_block_bytes(self) -> int:
        """Device bytes of a block when every layer has a buffer of its own."""
        return sum(part.row_bytes for parts in self._parts for part in parts) * (
            self._shape.block_tokens
        )

    @property
    def pool_stride(self) -> int:
        """Pool bytes of a block."""
        return BlockLayout(self.layout).stride

    def plan(self, device_bytes: int, pool_blocks: int) -> EnginePlan:
        """Choose the mode and the number of blocks.

        Args:
            device_bytes: memory for all buffers of one rank.
            pool_blocks: blocks of this layout that the pool has.
        Raises: PlanError when not even one sequence fits; OptionError.
        """
        resident = self._fit(self._ring("all"), device_bytes, None)
        mode, why = self._choose(resident)
        rolls = mode == "rolling"
        fit = self._fit(self._ring(), device_bytes, pool_blocks) if rolls else resident
        self._check_length(fit)
        return EnginePlan(
            replace(fit.ring, num_blocks=fit.blocks),
            self._names,
            self.layout,
            mode,
            why,
            fit.limit,
            resident.blocks,
            pool_blocks,
            self._opaque,
            self._drafts,
        )

    def _ring(self, independent: Literal["all"] | None = None) -> RingPlan:
        """The ring for one block; `plan` gives it its number of blocks."""
        options = self._options
        shared = options.num_shared or ROLLING_DEFAULT
        try:
            return plan_ring(
                self._parts,
                independent=independent or options.independent,
                num_shared=shared,
                num_blocks=1,
                block_tokens=self._shape.block_tokens,
                spare_buffers=options.spare_buffers,
                lookahead=options.lookahead,
            )
        except ValueError as error:
            raise _refusal(str(error)) from error

    def _choose(self, resident: _Fit) -> tuple[Mode, str]:
        options, shape = self._options, self._shape
        if options.offload == "resident":
            return "resident", "offload is resident"
        wanted = shape.max_seqs * -(-shape.max_len // shape.block_tokens)
        sequences = f"{shape.max_seqs} sequences of {shape.max_len} tokens"
        if options.offload == "auto":
            if options.num_shared is None:
                return "resident", "layerwise_num_shared_buffers is not given: nothing is shared"
            if wanted + 1 <= resident.blocks:
                return "resident", f"{sequences} fit without sharing buffers"
        ring = self._ring()
        if not ring.reuse:
            if options.independent == "all":
                return "resident", 'layerwise_independent_layers is "all": no buffer is shared'
            return (
                "resident",
                f"{self.num_layers} layers have {len(ring.slots)} buffers: " + ring.why,
            )
        if options.offload == "rolling":
            return "rolling", "offload is rolling"
        return "rolling", f"{sequences} need {wanted} blocks, {resident.blocks} fit without sharing"

    def _fit(self, ring: RingPlan, device_bytes: int, pool_blocks: int | None) -> _Fit:
        # Every slot begins on a page: what rounding may cost is taken off first.
        usable = device_bytes - 4096 * len(ring.slots) - 64 * len(ring.slots)
        blocks = max(0, usable // block_bytes(ring))
        limit: Limit = "device memory"
        if self._shape.device_blocks_override:
            blocks, limit = self._shape.device_blocks_override, "num_gpu_blocks_override"
        # Block 0 is the engine's null block: nothing of it is ever saved.
        if pool_blocks is not None and pool_blocks + 1 < blocks:
            blocks, limit = pool_blocks + 1, "pool bytes"
        return _Fit(ring, blocks, limit)

    def _check_length(self, fit: _Fit) -> None:
        shape = self._shape
        need = -(-shape.max_len // shape.block_tokens) + 1
        if fit.blocks >= need:
            return
        tokens = max(0, fit.blocks - 1) * shape.block_tokens
        remedy = {
            "pool bytes": "enlarge pool.size of kvd, or lower max_model_len",
            "device memory": "give more memory for KV, share more buffers, or lower max_model_len",
            "num_gpu_blocks_override": "raise num_gpu_blocks_override, or lower max_model_len",
        }[fit.limit]
        raise PlanError(
            f"one sequence of max_model_len = {shape.max_len} tokens does not fit: {fit.limit} "
            f"allows {tokens} tokens; {remedy}"
        )


def _refusal(text: str) -> OptionError | PlanError:
    """An error of `plan_ring`, in the names of the options, or of the model when none is wrong."""
    if text.startswith("part "):
        return PlanError(f"{text}; set offload to resident")
    for ours, theirs in (
        ("independent layer", "layerwise_independent_layers: layer"),
        ("num_shared", "layerwise_num_shared_buffers"),
        ("lookahead of layer", "onload_layer_map (or layerwise_prefetch_layers) of layer"),
        ("lookahead needs", "onload_layer_map needs"),
    ):
        text = text.replace(ours, theirs)
    return OptionError(f"{PREFIX}.{text}")
