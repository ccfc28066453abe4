"""The event stream against a kvd and a network that lose, refuse and restart at random."""

from __future__ import annotations

import threading
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.client.events import EventStream
from engine_shim.client.tickets import Ticket
from kvd.wire.slot_items import ComputedItem, StepItem

ITEMS = 12
"""Items that kvd takes in a batch, and remembers the codes of."""

SIZE = 10


class World:
    """A kvd, a network in order but lossy, and a stream; everything is decided by the test."""

    def __init__(self) -> None:
        self.stream = EventStream(threading.Lock(), 8)
        self.stream.replace(0, 0, ITEMS)
        self.now = 0
        self.request_no = 0
        self.next_no = 0
        self.codes: dict[int, str] = {}
        self.posted: list[tuple[int, Ticket]] = []
        self.applied: dict[int, str] = {}
        self.order: list[int] = []
        self.requests: deque[tuple[int, int, list[int], bool]] = deque()
        self.replies: deque[tuple[int, int, list[str], str, int]] = deque()
        self.unsaid: tuple[int, int, int] | None = None
        """Request number, first item and next number of quiet batches that were not answered."""

    def post(self, count: int, *, is_awaited: bool = True) -> None:
        for _ in range(count):
            name = len(self.posted)
            ticket = self.stream.append([ComputedItem(0, name)], [SIZE], is_awaited=is_awaited)
            self.posted.append((name, ticket))

    def send(self) -> None:
        if self.stream.is_due(self.now):
            self.request_no += 1
            batch = self.stream.take(self.request_no, self.now, 3 * SIZE)
            names = [one.epoch for one in batch.items if not isinstance(one, StepItem)]
            self.requests.append((self.request_no, batch.first_no, names, batch.is_quiet))

    def serve(self, how: str) -> None:
        """kvd takes one frame off the network: it does it, is busy, or never gets it."""
        if not self.requests:
            return
        number, first, names, quiet = self.requests.popleft()
        if how == "lost":
            return
        if how == "busy":
            self.replies.append((number, 0, [], "busy", -1))
        elif first > self.next_no:
            self.replies.append((number, self.next_no, [], "out_of_order", -1))
        else:
            assert first >= self.next_no - ITEMS, "sent again what kvd has forgotten"
            for at, name in enumerate(names, first):
                if at >= self.next_no:
                    self.apply(at, name)
            self.codes = {n: c for n, c in self.codes.items() if n >= self.next_no - ITEMS}
            codes = [self.codes[at] for at in range(first, first + len(names))]
            since = first if self.unsaid is None else min(first, self.unsaid[1])
            self.unsaid = (number, since, self.next_no) if quiet and not any(codes) else None
            if self.unsaid is None:
                self.replies.append((number, self.next_no, codes if any(codes) else [], "", since))

    def say(self) -> None:
        """kvd has waited long enough with the answer to quiet batches."""
        if self.unsaid is not None:
            number, since, next_no = self.unsaid
            self.replies.append((number, next_no, [], "", since))
            self.unsaid = None

    def apply(self, number: int, name: int) -> None:
        assert name not in self.applied, "applied twice"
        self.codes[number] = self.applied[name] = "odd" if name % 5 == 3 else ""
        self.order.append(name)
        self.next_no = number + 1

    def hear(self, *, lost: bool) -> None:
        """One reply arrives, or does not."""
        if not self.replies:
            return
        number, next_no, codes, code, since = self.replies.popleft()
        if lost:
            return
        if not code:
            assert self.stream.seen(number, next_no, codes, since)
        elif self.stream.owns(number):
            assert self.stream.refused(number, code, str(next_no), self.now)

    def wait(self) -> None:
        due = self.stream.next_due()
        if due is not None:
            self.now = max(self.now, due)
            self.stream.tick(self.now)

    def reconnect(self, *, restarted: bool) -> None:
        self.stream.close()
        self.requests.clear()
        self.replies.clear()
        self.unsaid = None
        if not restarted:
            assert self.stream.can_resume(self.next_no)
            self.stream.resume(self.next_no, ITEMS)
            return
        for name, ticket in self.posted:
            if not ticket.is_settled:
                self.applied[name] = "pool_lost"
        self.next_no = 100
        self.codes.clear()
        self.stream.replace(100, self.stream.mark(), ITEMS)

    def check(self) -> None:
        assert self.order == sorted(self.order), "overtaken"
        for name, ticket in self.posted:
            if ticket.is_settled:
                assert ticket.code == self.applied[name], name


USUAL = ["post", "report", "send", "do", "hear", "say"]
STEPS = st.sampled_from([*USUAL * 3, "busy", "lost", "mute", "wait", "wait", "again", "restart"])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(STEPS, min_size=40, max_size=120), st.integers(1, 5))
def test_every_item_arrives_once_and_in_order_whatever_the_network_does(
    steps: list[str], count: int
) -> None:
    world = World()
    for step in steps:
        match step:
            case "post" | "report":
                world.post(count, is_awaited=step == "post")
            case "say":
                world.say()
            case "send":
                world.send()
            case "do" | "busy" | "lost":
                world.serve(step)
            case "hear" | "mute":
                world.hear(lost=step == "mute")
            case "wait":
                world.wait()
            case _:
                world.reconnect(restarted=step == "restart")
        world.check()
    for _ in range(200):  # calm weather: everything must come through
        if not len(world.stream):
            break
        world.send()
        world.serve("do")
        world.say()
        world.hear(lost=False)
        if not (world.requests or world.replies or world.stream.is_due(world.now)):
            world.wait()
    world.check()
    assert len(world.stream) == world.stream.bytes == 0
    assert all(ticket.is_settled for _, ticket in world.posted)
