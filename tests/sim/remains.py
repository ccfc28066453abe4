"""What survives a kvd: the headers of its pool, and its record of members and regions."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.core import effects as fx
from kvd.core.adopted import AdoptedBlocks, AdoptedPool, NodeAdopted
from kvd.core.block_columns import BlockColumns
from kvd.core.block_types import BlockShape, BlockState
from kvd.core.ids import MemberRef
from kvd.core.state import State
from kvd.core.transfer_events import RegionSpec
from tests.sim.regions import RegionMemory

Record = tuple[
    tuple[bytes, int, int, BlockShape, tuple[tuple[bytes, bytes], ...]] | None,
    tuple[MemberRef, ...],
    tuple[tuple[str, str, RegionSpec], ...],
]


class Remains:
    """As `kvd.memory` keeps them: the record whole, before any effect; headers one by one."""

    def __init__(self) -> None:
        self.headers: dict[int, tuple[bytes, bytes, int] | None] = {}
        """None: it is being filled."""
        self._formatted: tuple[bytes, int] | None = None
        self._record: Record = (None, (), ())
        self._roster = -1

    def record(self, state: State) -> None:
        """Remember members, regions and layout, if they changed."""
        if state.roster == self._roster:
            return
        self._roster = state.roster
        pool = None
        if state.pool is not None:
            table = state.pool.blocks
            spaces = tuple((d, state.probes.get(n, b"")) for d, n in state.namespaces.items())
            pool = (state.pool.digest, state.pool.stride, table.total, table.shape, spaces)
        members = [ref for ref, member in state.members.items() if not member.leaving]
        regions = [r for r in state.regions.values() if r.ready and not r.dropped]
        self._record = (
            pool,
            tuple(sorted({*members, *state.absent})),
            tuple((r.name, r.engine, r.spec) for r in regions),
        )

    def format(self, effect: fx.FormatPool) -> None:
        """No header is left."""
        self.headers.clear()
        self._formatted = (effect.digest, effect.stride)

    def mark(self, blocks: tuple[int, ...]) -> None:
        """These may be written."""
        self.headers.update(dict.fromkeys(blocks))

    def write(self, effect: fx.WriteHeader) -> None:
        """This one is ready."""
        self.headers[effect.block] = (effect.namespace, effect.block_hash, effect.tokens)

    def clear(self, blocks: tuple[int, ...]) -> None:
        """These hold nothing."""
        for block in blocks:
            self.headers.pop(block, None)

    def adopted(self, memory: Mapping[str, RegionMemory]) -> NodeAdopted:
        """What the next life is told first. memory: of the regions that were made."""
        was, absent, regions = self._record
        self._roster = -1
        pool = None
        if was is not None and self._formatted == was[:2]:
            digest, stride, total, shape, spaces = was
            blocks = AdoptedBlocks(self._columns(total, [space for space, _ in spaces]))
            pool = AdoptedPool(digest, stride, shape, spaces, blocks)
        else:
            self.headers.clear()
        return NodeAdopted(pool, absent, tuple(r for r in regions if r[0] in memory))

    def _columns(self, total: int, digests: list[bytes]) -> BlockColumns:
        columns = BlockColumns(total)
        for block, header in self.headers.items():
            columns.states[block] = BlockState.FILLING if header is None else BlockState.READY
            if header is not None:
                namespace, block_hash, tokens = header
                columns.set_key(block, (digests.index(namespace), block_hash), tokens)
        return columns
