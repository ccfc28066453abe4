"""From one life of kvd to the next: what is recorded, and what the next life makes of it."""

from __future__ import annotations

import asyncio
import os
import select
from typing import TYPE_CHECKING

from kvd.core import events as ev
from kvd.core.adopted import AdoptedPool
from kvd.core.block_types import BlockShape
from kvd.core.ids import MemberRef
from kvd.core.state import State
from kvd.core.transfer_events import RegionSpec
from kvd.memory.inheritance import Inheritance
from kvd.memory.node_record import MemberRecord, NodeRecord, PoolRecord, RegionRecord
from kvd.memory.owners.base import kept_member, kept_region

if TYPE_CHECKING:
    from kvd.server.node import Node


def record_of(state: State) -> NodeRecord:
    """What the next life must know."""
    pool = None
    if state.pool is not None:
        shape = state.pool.blocks.shape
        pool = PoolRecord(
            state.pool.digest,
            state.pool.stride,
            state.pool.blocks.total,
            shape.block_tokens,
            shape.num_layers,
            shape.num_shards,
            [(digest, state.probes.get(n, b"")) for digest, n in state.namespaces.items()],
        )
    # Who is leaving touches nothing any more: the next life need not wait for it.
    refs = sorted({*(ref for ref, m in state.members.items() if not m.leaving), *state.absent})
    regions = [r for r in state.regions.values() if r.ready and not r.dropped]
    return NodeRecord(
        pool=pool,
        members=[MemberRecord(*ref, kept_member(ref)) for ref in refs],
        regions=[_region_record(r.name, r.engine, r.spec) for r in regions],
    )


def _region_record(name: str, engine: str, spec: RegionSpec) -> RegionRecord:
    return RegionRecord(
        name,
        engine,
        spec.num_layers,
        spec.num_blocks,
        spec.block_tokens,
        spec.row_bytes,
        kept_region(name),
    )


def adopted_event(found: Inheritance) -> ev.NodeAdopted:
    """What the machine is told of an earlier life."""
    record = found.record.last or NodeRecord()
    pool = None
    if record.pool is not None and found.blocks is not None:
        was = record.pool
        pool = AdoptedPool(
            was.digest,
            was.stride,
            BlockShape(was.block_tokens, was.num_layers, was.num_shards),
            tuple(was.namespaces),
            found.blocks,
        )
    return ev.NodeAdopted(
        pool,
        tuple(MemberRef(m.engine, m.member, m.incarnation) for m in record.members),
        tuple(
            (r.name, r.engine, RegionSpec(r.num_layers, r.num_blocks, r.block_tokens, r.row_bytes))
            for r in record.regions
            if r.name in found.regions
        ),
    )


class LastLife:
    """Watches members of the last life until they say hello or are proven dead."""

    def __init__(self, node: Node) -> None:
        """Nothing is watched before `adopt`."""
        self._node = node
        self._pidfds: dict[MemberRef, int] = {}

    def adopt(self) -> None:
        """Tell the machine what was taken over, and of the deaths that nobody saw."""
        node = self._node
        found = node.memory.inherited
        if node.memory.note:
            node.logs.info("last life", detail=node.memory.note)
        if found is None:
            return
        event = adopted_event(found)
        loop = asyncio.get_running_loop()
        node.apply(event)
        for ref in event.absent:
            pidfd = found.pidfds.pop(kept_member(ref), -1)
            if pidfd < 0:
                continue  # nothing can prove its death: its blocks are held until it says hello
            if has_ended(pidfd):
                os.close(pidfd)
                node.apply(ev.MemberDied(ref))
                continue
            self._pidfds[ref] = pidfd
            loop.add_reader(pidfd, self._died, ref)
        node.on_joined.append(self._forget)

    def _died(self, ref: MemberRef) -> None:
        self._forget(ref)
        if ref in self._node.state.absent:
            self._node.apply(ev.MemberDied(ref))

    def _forget(self, ref: MemberRef) -> None:
        pidfd = self._pidfds.pop(ref, -1)
        if pidfd >= 0:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Watch nobody any more."""
        for ref in list(self._pidfds):
            self._forget(ref)


def has_ended(pidfd: int) -> bool:
    """Whether the process is proven to have ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
