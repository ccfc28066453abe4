"""A whole world of one seed: nodes, engines, links, memory; a time of faults, then a calm one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core.ids import MemberRef
from tests.sim.clock import MS, Clock
from tests.sim.content import Document
from tests.sim.decode import DecodeEngine
from tests.sim.links import Faults, Links
from tests.sim.member import Member
from tests.sim.memory import Area, Copy, Dma
from tests.sim.node import Node
from tests.sim.options import Options, draw
from tests.sim.oracle import Oracle
from tests.sim.prefill import PrefillEngine


class World:
    """Everything that exists in one run. `run` raises `Violation` when a rule is broken."""

    def __init__(self, seed: int, tracing: Callable[[str], None] | None = None) -> None:
        """Draw the world of a seed.

        tracing: gets every line of the trace.
        """
        self.seed = seed
        self.rng = random.Random(seed)
        self.step_rng = random.Random(f"steps of {seed}")
        self.options: Options = draw(self.rng)
        self.clock = Clock()
        self.faults = Faults()
        self.links = Links(self.clock, self.rng, self.options, self.faults)
        self.dma = Dma()
        self.oracle = Oracle(self.options.num_shards)
        self.members: dict[MemberRef, Member] = {}
        self.slots: dict[tuple[MemberRef, int], Area] = {}
        self.nodes: dict[str, Node] = {}
        self.engines: dict[str, PrefillEngine] = {}
        self.decoders: dict[str, DecodeEngine] = {}
        self.blind: dict[str, int] = {}
        self.marks: Counter[str] = Counter()
        self.num_events = 0
        self.num_transfers = 0
        self._numbers = 0
        self._tracing = tracing
        self._populate()

    def _populate(self) -> None:
        options = self.options
        decode_at = ["p", "d1"] if options.same_node else ["d0", "d1"]
        for address in ["p", *decode_at[: options.num_decoders]]:
            if address not in self.nodes:
                self.nodes[address] = Node(self, address)
        for node in self.nodes.values():
            node.start()
        for number in range(options.num_engines):
            self.start_engine(f"engine{number}", "p", 1)
        for number in range(options.num_decoders):
            self.start_decoder(f"decoder{number}", decode_at[number], 1)

    def start_engine(self, name: str, address: str, incarnation: int) -> None:
        """A new life of a prefill engine."""
        self.engines[name] = PrefillEngine(self, self.nodes[address], name, incarnation)

    def start_decoder(self, name: str, address: str, incarnation: int) -> None:
        """A new life of a decode engine."""
        self.decoders[name] = DecodeEngine(self, self.nodes[address], name, incarnation)

    # Chance ----------------------------------------------------------------------------------

    def happens(self, rate: float) -> bool:
        """Whether a fault of this rate happens now."""
        return self.faults.on and rate > 0 and self.rng.random() < rate

    def next_number(self) -> int:
        """A number that was never used."""
        self._numbers += 1
        return self._numbers

    @property
    def tracing(self) -> bool:
        """Whether anybody reads the trace."""
        return self._tracing is not None

    def trace(self, line: str) -> None:
        """Write a line when somebody reads it."""
        if self._tracing is not None:
            self._tracing(f"{self.clock.now / MS:10.3f} {line}")

    # Services of the operating system and the hardware ---------------------------------------

    def with_reply(self, event: Any, handle: int) -> Any:
        """The event with its handle."""
        return replace(event, reply=handle)

    def run_copy(self, copy: Copy, then: Callable[..., None], *args: Any) -> None:
        """Copy for a while; `then(ok, *args)` unless its executor dies before the end."""
        options = self.options
        is_read = copy.executor.startswith("kvd#")
        longest = options.read_time if is_read else options.copy_time
        failure = options.read_failure if is_read else options.copy_failure
        duration = self.rng.randint(1, longest)
        if self.happens(self.options.hang_rate):
            duration += self.options.hang_time
        self.trace(f"copy starts: {copy.name}")
        self.dma.start(copy)
        ok = not self.happens(failure)
        self.clock.at(duration, self._copied, copy, ok, then, args)

    def _copied(
        self, copy: Copy, ok: bool, then: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        if copy.live:
            self.trace(f"copy ends {'well' if ok else 'badly'}: {copy.name}")
            self.dma.end(copy, ok)
            then(ok and not copy.doubted, *args)

    def is_blind(self, node: Node) -> bool:
        """Whether a node cannot learn the state of its processes now."""
        return self.faults.on and self.blind.get(node.address, 0) > self.clock.now

    def prove_death(self, node: Node, member: Member) -> None:
        """The node's kvd learns that a process has ended, after a while."""
        delay = self.rng.randint(1, self.options.proof_delay)
        self.clock.at(delay, self._proven, node, member)

    def _proven(self, node: Node, member: Member) -> None:
        if self.is_blind(node):
            self.clock.at(20 * MS, self._proven, node, member)
        elif node.knows(member.ref):
            node.handle(ev.MemberDied(member.ref))

    def fence_process(self, node: Node, effect: fx.FenceMember) -> None:
        """The node's kvd wants proof that a process has ended."""
        self.clock.at(self.rng.randint(1, 30 * MS), self._fence, node, node.boot, effect)

    def _fence(self, node: Node, boot: int, effect: fx.FenceMember) -> None:
        member = self.members[effect.member]
        stopped = not member.alive and not self.is_blind(node)
        event: ev.Event = ev.FenceEnded(effect.ref, effect.kind, effect.owner, stopped)
        if stopped and self.rng.random() < 0.5:
            event = ev.MemberDied(effect.member)
        node.tell(boot, event)

    # Work ------------------------------------------------------------------------------------

    def document(self) -> tuple[Document, int]:
        """Something to work on, often with the beginning of something earlier; its length."""
        rng = self.rng
        family = rng.randint(1, 3)
        fork = (2, 5, 9)[family - 1]
        return Document(family, rng.randint(1, 4), fork), rng.randint(2, self.options.request_max)

    def arrive(self) -> None:
        """A request arrives at some engine; then the next one is due."""
        if not self.faults.on:
            return
        options, rng = self.options, self.rng
        document, length = self.document()
        if rng.random() < options.transfer_rate:
            decoder = rng.choice(list(self.decoders.values()))
            decoder.call(decoder.begin, document, length)
        else:
            engine = rng.choice(list(self.engines.values()))
            engine.scheduler.call(engine.submit, document, length)
        if self.happens(options.abort_rate):
            self.clock.at(rng.randint(0, 100 * MS), self._abort_some)
        self.clock.at(rng.randint(1, 2 * options.arrival), self.arrive)

    def _abort_some(self) -> None:
        engine = self.rng.choice(list(self.engines.values()))
        if engine.requests and engine.scheduler.alive and not engine.scheduler.stopped:
            engine.abort(self.rng.choice(list(engine.requests.values())))

    def order(self, decoder: DecodeEngine, transfer: str, document: Document, length: int) -> None:
        """The proxy sends the prefill half of a request to some prefill engine."""
        rank = self.rng.randrange(self.options.tp_size)
        shard = rank if self.options.num_shards > 1 else 0
        self.oracle.transfers[transfer] = (document, length, shard)
        engine = self.rng.choice(list(self.engines.values()))
        self.clock.at(
            self.rng.randint(1, 5 * MS), engine.scheduler.call, engine.submit, document, length,
            transfer, decoder.node.address, rank,
        )  # fmt: skip
