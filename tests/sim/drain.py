"""Rule 9: when faults stop, everything comes to its end in bounded time."""

from __future__ import annotations

from kvd.core.blocks import BlockState
from kvd.core.state import State
from tests.sim.node import Node
from tests.sim.world import World


def leftovers(world: World) -> list[str]:
    """Everything that has not come to its end, one sentence each."""
    found: list[str] = []
    for copy in world.dma.live:
        found.append(f"{copy.name} runs")
    for node in world.nodes.values():
        found += [f"{node.address}: {text}" for text in _of_node(node)]
    for engine in world.engines.values():
        if not engine.ready and not engine.closing:
            found.append(f"{engine.name} has no session")
        if engine.step is not None:
            found.append(f"{engine.name} is in step {engine.step.number}")
        found += [f"{engine.name}: request {name} is open" for name in engine.requests]
    for decoder in world.decoders.values():
        if not decoder.ready:
            found.append(f"{decoder.name} has no region")
        found += [f"{decoder.name}: transfer {name} is open" for name in decoder.transfers]
    return found


def _of_node(node: Node) -> list[str]:
    machine = node.machine
    if machine is None:
        return ["down"]
    state = machine.state
    found = [f"{what} was never answered" for what in node.handles.open]
    for member in state.members.values():
        if member.leaving:
            found.append(f"{member.ref} is leaving")
        found += [f"{member.slots[index]} is held" for index in member.held]
    found += _of_pool(state)
    for going in state.outgoing.values():
        found += [f"read {read.read} is open" for read in going.open.values()]
    for coming in state.incoming.values():
        if not coming.is_over:
            found.append(f"transfer {coming.transfer} is not over")
        found += [
            f"read {read.read} is {read.phase}"
            for read in coming.reads.values()
            if read.phase != "ended"
        ]
    found += [f"a waiter for {waiter.transfer}" for waiter in state.waiters]
    found += [f"region {r.name} is dropped" for r in state.regions.values() if r.dropped]
    return found


def _of_pool(state: State) -> list[str]:
    if state.pool is None:
        return []
    table = state.pool.blocks
    found = [
        f"block {block} is pinned by {sorted(map(str, pins))}" for block, pins in table.pins.items()
    ]
    found += [
        f"block {block} is {BlockState(value).name.lower()}"
        for block, value in enumerate(table.state)
        if value in (BlockState.FILLING, BlockState.POISONED)
    ]
    found += [f"span {span} is read" for span in table.span_readers]
    found += [f"{save} is open" for save in table.save_blocks]
    found += [f"{step} is open" for step in table.steps]
    return found
