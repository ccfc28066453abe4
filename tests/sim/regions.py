"""Host memory that a kvd owns: the pool of one life of it, and decode regions."""

from __future__ import annotations

from kvd.core.blocks import BlockShape
from kvd.core.events import RegionSpec
from kvd.core.transfer_types import SourceKind
from tests.sim.memory import Area, Piece, area


class PoolMemory:
    """Blocks of one pool; a restarted kvd has another one, the old stays while it is mapped."""

    def __init__(self, name: str, shape: BlockShape) -> None:
        self.name = name
        self.shape = shape
        self._blocks: dict[int, list[Area]] = {}

    def block(self, block: int) -> list[Area]:
        """Areas of all spans of a block, [layer * num_shards + shard]."""
        areas = self._blocks.get(block)
        if areas is None:
            shape = self.shape
            areas = [
                area(f"{self.name} block {block} span {span}", shape.block_tokens)
                for span in range(shape.num_spans)
            ]
            self._blocks[block] = areas
        return areas

    def span(self, block: int, layer: int, shard: int) -> Area:
        """One span of a block."""
        return self.block(block)[self.shape.span(layer, shard)]


class RegionMemory:
    """One decode region: an area for each (layer, block)."""

    def __init__(self, name: str, spec: RegionSpec) -> None:
        self.spec = spec
        self.areas = [
            [
                area(f"{name} layer {layer} block {block}", spec.block_tokens)
                for block in range(spec.num_blocks)
            ]
            for layer in range(spec.num_layers)
        ]


def pieces_of(
    rows: tuple[int, int],
    sources: list[Area],
    source_blocks: tuple[int, ...],
    source_tokens: int,
    kind: SourceKind,
    targets: list[Area],
    target_tokens: int,
) -> tuple[Piece, ...]:
    """Pieces that move rows [start, end) of one layer.

    sources: POOL: one area for each source block; SLOT: one area, cut by `source_blocks`.
    targets: one area for each destination block.
    """
    start, end = rows
    pieces = []
    row = start
    while row < end:
        count = min(
            end - row, source_tokens - row % source_tokens, target_tokens - row % target_tokens
        )
        at = row // source_tokens - start // source_tokens
        offset = row % source_tokens
        if kind is SourceKind.SLOT:
            place, offset = sources[0], source_blocks[at] * source_tokens + offset
        else:
            place = sources[at]
        target = targets[row // target_tokens - start // target_tokens]
        pieces.append(Piece(place, offset, target, row % target_tokens, count))
        row += count
    return tuple(pieces)
