"""What goes wrong with processes and links, each at its own drawn pace."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core import events as ev
from tests.sim.clock import MS
from tests.sim.decode import DecodeEngine
from tests.sim.member import Member
from tests.sim.node import Node
from tests.sim.prefill import PrefillEngine
from tests.sim.world import World


class Injector:
    """Plans faults until the calm phase; what it broke is mended after a while by itself."""

    def __init__(self, world: World) -> None:
        self._world = world
        options = world.options
        self._plan(options.kill_gap, self._kill_engine)
        self._plan(options.kvd_kill_gap, self._kill_kvd)
        self._plan(options.stop_gap, self._stop)
        self._plan(options.partition_gap, self._partition)
        self._plan(options.disconnect_gap, self._disconnect)
        self._plan(options.renew_gap, self._renew)
        if options.blind_rate:
            self._plan(300 * MS, self._blind)

    def calm(self) -> None:
        """No more faults; everything that was broken is mended now or soon."""
        world = self._world
        world.faults.on = False
        for node in world.nodes.values():
            node.fuse = False
        for member in list(world.members.values()):
            if member.alive and member.stopped:
                member.resume()

    def _plan(self, gap: int, fault: Callable[[], None]) -> None:
        if gap:
            self._world.clock.at(self._world.rng.randint(1, 2 * gap), self._due, gap, fault)

    def _due(self, gap: int, fault: Callable[[], None]) -> None:
        if self._world.faults.on:
            fault()
            self._plan(gap, fault)

    # Engines ---------------------------------------------------------------------------------

    def _kill_engine(self) -> None:
        world, rng = self._world, self._world.rng
        everybody: list[PrefillEngine | DecodeEngine] = [
            *world.engines.values(),
            *world.decoders.values(),
        ]
        victim = rng.choice(everybody)
        if isinstance(victim, DecodeEngine):
            if victim.alive:
                victim.die()
                world.clock.at(rng.randint(0, 200 * MS), self._restart_decoder, victim)
            return
        if not victim.alive or victim.closing:
            return
        if rng.random() < 0.3:
            self._goodbye(victim)
            return
        first = rng.choice(victim.members)
        first.die()
        for member in victim.members:
            world.clock.at(rng.randint(0, 30 * MS), member.die)
        world.clock.at(rng.randint(31, 200) * MS, self._restart_engine, victim)

    def _restart_engine(self, engine: PrefillEngine) -> None:
        address = engine.node.address
        self._world.start_engine(engine.name, address, engine.incarnation + 1)

    def _restart_decoder(self, decoder: DecodeEngine) -> None:
        address, ref = decoder.node.address, decoder.ref
        self._world.start_decoder(decoder.name, address, ref.incarnation + 1)

    def _goodbye(self, engine: PrefillEngine) -> None:
        """An orderly end: no new work, then each member leaves once it touches nothing."""
        engine.closing = True
        for request in list(engine.requests.values()):
            engine.scheduler.call(engine.abort, request)
        self._world.clock.at(10 * MS, self._leave, engine)

    def _leave(self, engine: PrefillEngine) -> None:
        world = self._world
        executors = [member.executor for member in engine.members]
        busy = engine.step is not None or any(copy.executor in executors for copy in world.dma.live)
        if busy:
            world.clock.at(10 * MS, self._leave, engine)
            return
        for member in engine.members:
            if member.alive:
                member.said_goodbye = True
                member.alive = False
                world.prove_death(member.node, member)
        world.clock.at(world.rng.randint(1, 100 * MS), self._restart_engine, engine)

    def _stop(self) -> None:
        """SIGSTOP, and SIGCONT after a while: silent, but not dead, and its copies go on."""
        world, rng = self._world, self._world.rng
        alive = [m for m in world.members.values() if m.alive and not m.stopped]
        if not alive:
            return
        member = rng.choice(alive)
        member.stopped = True
        world.trace(f"{member.ref} is stopped")
        world.clock.at(rng.choice((20, 100, 600)) * MS, self._continue, member)

    def _continue(self, member: Member) -> None:
        if member.alive and member.stopped:
            self._world.trace(f"{member.ref} is continued")
            member.resume()

    # Nodes and links -------------------------------------------------------------------------

    def _kill_kvd(self) -> None:
        world, rng = self._world, self._world.rng
        node = rng.choice(list(world.nodes.values()))
        if node.machine is not None and not node.fuse:
            if rng.random() < 0.5:
                node.fuse = True
            else:
                node.kill()
            world.clock.at(rng.choice((1, 20, 150)) * MS, self._start_kvd, node)

    def _start_kvd(self, node: Node) -> None:
        if node.machine is None:
            node.start()
        elif node.fuse:
            self._world.clock.at(5 * MS, self._start_kvd, node)

    def _disconnect(self) -> None:
        """An attach socket closes while both processes live."""
        world, rng = self._world, self._world.rng
        member = rng.choice(list(world.members.values()))
        if member.alive and member.boot == member.node.boot:
            world.trace(f"{member.ref} is disconnected")
            member.lost(member.boot)
            world.clock.at(
                rng.randint(1, 30 * MS), member.node.tell, member.boot, ev.MemberSilent(member.ref)
            )

    def _renew(self) -> None:
        """A decode engine gives its region back and asks for it again."""
        decoder = self._world.rng.choice(list(self._world.decoders.values()))
        decoder.call(decoder.renew)

    def _partition(self) -> None:
        world, rng = self._world, self._world.rng
        address = rng.choice(list(world.nodes))
        length = rng.choice((30, 200, 500)) * MS
        deaf, mute = rng.choice(((True, True), (True, False), (False, True)))
        world.trace(f"{address} is cut off for {length // MS} ms, deaf {deaf}, mute {mute}")
        world.links.cut(address, world.clock.now + length, deaf=deaf, mute=mute)

    def _blind(self) -> None:
        world, rng = self._world, self._world.rng
        if rng.random() < world.options.blind_rate:
            node: Node = rng.choice(list(world.nodes.values()))
            world.blind[node.address] = world.clock.now + rng.choice((50, 300, 800)) * MS
