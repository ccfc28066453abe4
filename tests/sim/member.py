"""A member process of an engine: its session with its kvd, its requests, its slot events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvd.core import events as ev
from kvd.core.errors import KvdError
from kvd.core.holds import HoldKind
from kvd.core.ids import MemberRef, SlotRef, member_executor
from kvd.core.results import Joined, Result, SlotsSeen
from tests.sim.clock import MS
from tests.sim.links import Channel
from tests.sim.memory import Area, Violation
from tests.sim.telling import OwnEvent, Telling, as_used

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

Answer = Result | KvdError | None
"""What a request got; None: the kvd that was asked is gone."""

STREAM_BATCH = 6
WINDOW_MAX = 48
"""Unacknowledged events at most, less a batch; below the limit `batch_items` of the machine."""


class Member:
    """One process. `alive` until it dies; while `stopped` it runs nothing, its copies go on.

    boot: life of the kvd with which it has a session, 0 for none.
    """

    def __init__(self, world: World, node: Node, ref: MemberRef) -> None:
        self.world = world
        self.node = node
        self.ref = ref
        self.executor = member_executor(ref)
        self.alive = True
        self.stopped = False
        self.said_goodbye = False
        self.boot = 0
        self.slot_areas: list[Area] = []
        self.page: list[int] = []
        self.down = Channel(world.clock, world.rng, world.options, world.faults)
        self._up = Channel(world.clock, world.rng, world.options, world.faults)
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._pages: dict[int, list[int]] = {}
        self._next_request = 1
        self._pending: dict[int, tuple[ev.Event, Callable[[Answer], None]]] = {}
        self._attaching = 0
        self._stream_boot = 0
        self._base = 0
        self._sent = 0
        self._flushing = False
        self._items: deque[Telling] = deque()
        world.members[ref] = self

    # The process -----------------------------------------------------------------------------

    def call(self, call: Callable[..., None], *args: Any) -> None:
        """Run something in this process: now, or once it is continued, or never."""
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append((call, args))
        else:
            call(*args)

    def later(self, delay: int, call: Callable[..., None], *args: Any) -> None:
        """Run something in this process after a while."""
        self.world.clock.at(delay, self.call, call, *args)

    def resume(self) -> None:
        """SIGCONT: what came meanwhile is handled now, in its order."""
        self.stopped = False
        while self._backlog and not self.stopped:
            call, args = self._backlog.popleft()
            self.call(call, *args)

    def die(self) -> None:
        """The process ends; what it copied stops; the proof reaches the kvd later."""
        if not self.alive:
            return
        self.alive = False
        self._backlog.clear()
        self.world.trace(f"{self.ref} dies")
        self.world.dma.stop_all(self.executor)
        self.world.prove_death(self.node, self)

    # The session -----------------------------------------------------------------------------

    def hello(self) -> ev.MemberJoined:
        """What this process says to a kvd that it attaches to now."""
        raise NotImplementedError

    def on_attached(self) -> None:
        """The session stands."""

    def on_lost(self) -> None:
        """The session is gone: the kvd died, or the socket closed."""

    def attach(self) -> None:
        """Connect and say hello, until that works. What is announced is as of this moment."""
        node = self.node
        if self.boot or self._attaching or self.said_goodbye:
            return
        if node.machine is None:
            self.later(self.world.rng.randint(MS, 20 * MS), self.attach)
            return
        self._attaching = node.boot
        hello = self.hello()
        if self._stream_boot != node.boot:
            # From here on every event counts from 0, on top of what is announced now.
            self._stream_boot = node.boot
            self._base = self._sent = 0
            self._items.clear()
        self._request(hello, self._hello_answered)
        self.later(400 * MS, self._hello_late, node.boot)

    def _hello_late(self, boot: int) -> None:
        if self._attaching == boot and self.node.boot != boot:
            self.world.trace(f"{self.ref} gives up on boot {boot}")
            self._lost(boot)

    def _hello_answered(self, answer: Answer) -> None:
        boot, self._attaching = self._attaching, 0
        if isinstance(answer, Joined):
            self.boot = boot
            self.page = self._pages[boot]
            self._sent = self._base
            self._flush()
            self.on_attached()
        elif answer is not None:
            if answer.code != "engine_busy":  # type: ignore[union-attr]
                raise Violation("never", f"{self.ref}: hello refused with {answer}")
            self._stream_boot = 0
            self.later(self.world.rng.randint(MS, 50 * MS), self.attach)

    def page_ready(self, boot: int, page: list[int]) -> None:
        """The kvd passed its gate page over; it is used once the hello is answered."""
        self._pages[boot] = page

    def lost(self, boot: int) -> None:
        """The attach socket closed."""
        self.call(self._lost, boot)

    def _lost(self, boot: int) -> None:
        if boot not in (self.boot, self._attaching):
            return
        self.world.trace(f"{self.ref} lost boot {boot}")
        self.boot = self._attaching = 0
        pending, self._pending = self._pending, {}
        for _, then in pending.values():
            then(None)
        self.on_lost()
        self.later(self.world.rng.randint(0, 10 * MS), self.attach)

    # Requests --------------------------------------------------------------------------------

    def ask(self, event: ev.Event, then: Callable[[Answer], None]) -> None:
        """Ask the kvd, again and again until it answers or is gone; `then` runs exactly once."""
        if not self.boot:
            self.later(0, then, None)
            return
        self._request(event, then)

    def _request(self, event: ev.Event, then: Callable[[Answer], None]) -> None:
        number = self._next_request
        self._next_request += 1
        self._pending[number] = (event, then)
        self._transmit(number)

    def _transmit(self, number: int) -> None:
        pending = self._pending.get(number)
        if pending is None:
            return
        boot = self.boot or self._attaching
        self._up.send(self.node.request, boot, self, number, pending[0])
        again = self.world.rng.randint(20 * MS, 80 * MS) + 3 * self.world.options.channel_delay
        if isinstance(pending[0], ev.TransferAwaited):
            again *= 6
        self.later(again, self._transmit, number)

    def answered(self, boot: int, number: int, answer: Answer) -> None:
        """A reply arrived; late and repeated ones find nothing."""
        if boot in (self.boot, self._attaching):
            pending = self._pending.pop(number, None)
            if pending is not None:
                pending[1](answer)

    def say_once(self, event: ev.Event) -> None:
        """Tell the kvd something that it will ask for again if it is lost."""
        if self.boot:
            self._up.send(self.node.tell, self.boot, event)

    # Slot events -----------------------------------------------------------------------------

    def say(self, event: OwnEvent, then: Callable[[str], None] | None = None) -> None:
        """Add to the stream of slot events; `then` gets the code once it is acknowledged."""
        self._tell(event).thens.extend([then] if then is not None else [])
        self._flush()

    def _tell(self, event: OwnEvent) -> Telling:
        """The item that says it: the last one of its tenancy, or a new one."""
        used = as_used(event) if self.world.options.merges else None
        made = Telling(used or event)
        last = next((item for item in reversed(self._items) if item.ref == made.ref), None)
        if made.ref is not None and last is not None:
            if used is not None and last.add(used):
                self.world.marks["told with what was not sent"] += 1
                return last
            last.is_open = False
        self._items.append(made)
        return made

    def is_unheard(self, ref: SlotRef) -> bool:
        """Whether an event about this tenancy is not acknowledged yet."""
        return any(item.ref == ref for item in self._items)

    def _flush(self) -> None:
        if self.boot and not self._flushing and self._items:
            self._flushing = True
            longest = 30 * MS if self.world.options.merges else MS // 2
            self.later(self.world.rng.randint(0, longest), self._send_stream)

    def _send_stream(self) -> None:
        self._flushing = False
        if not self.boot or not self._items:
            return
        first = self._base
        if self.world.options.pipelined:
            ahead = min(len(self._items), WINDOW_MAX)
            first = max(first, min(self._sent, self._base + ahead))
        skip = first - self._base
        telling = list(self._items)[skip : skip + STREAM_BATCH]
        for one in telling:
            one.is_open = False
        items = tuple(one.event for one in telling)
        if items:
            self._sent = first + len(items)
            event = ev.SlotsChanged(0, self.ref, first, items)
            self._request(event, lambda answer: self._acknowledged(first, len(items), answer))

    def _acknowledged(self, first: int, count: int, answer: Answer) -> None:
        if isinstance(answer, KvdError):
            expected = self.world.options.pipelined or first < self._base
            if answer.code != "out_of_order" or not expected:
                raise Violation("never", f"{self.ref}: slot events refused with {answer}")
            self._sent = self._base
        elif isinstance(answer, SlotsSeen):
            if first > self._base:
                # An acknowledgement of later events, but the one before it was lost.
                self._sent = self._base
            for number in range(first, first + count):
                if number == self._base:
                    self._base += 1
                    told = self._items.popleft()
                    code = answer.codes[number - first] if answer.codes else ""
                    for then in told.thens:
                        then(code)
        self._flush()

    # What the kvd asks or shows --------------------------------------------------------------

    def gate_changed(self, slot: int) -> None:
        """A word of the gate page changed."""

    def asked(self, boot: int, ref: SlotRef, kind: HoldKind, owner: str) -> None:
        """The kvd asks what became of a hold."""
