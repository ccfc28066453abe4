"""The stream of a member's slot events: in order, each exactly once, until acknowledged.

Theory of operation
-------------------
Events arm and lift holds, so none may be lost, repeated or overtake another. Each item has a
number; kvd applies a number once, and answers every batch with a code for each of its items::

      base            cursor              end
       | under way      | not sent yet     |
    ---+----------------+------------------+----> numbers
       acknowledged     at most `window` batches and `items_max` items

* A batch goes out while few enough are under way; what is posted meanwhile joins the next. Batches
  of reports alone, for whose answer nobody waits, do not hold up one that is waited for.
* What is posted as *riding* starts no batch for `RIDE_NS`: a later event of the same use of a slot
  is bound to follow, and takes it along. It also goes when somebody waits for its ticket (`push`).
  Copies of a step that kvd keeps are announced so: their layers go a few at a time.
* What happens in a tenancy and goes well is added to what was told of it and not sent yet
  (`append_open`): it is no later than that by anything that kvd could notice, as tenancies are
  told apart, and what a step keeps is told to be closed behind the ends of its copies.
* A batch for whose answer nobody waits is *quiet*: kvd answers it with the next one, or a moment
  later, and names the first item that it answers. What it does not name so stays unanswered.
* A batch that kvd did not take (`busy`, `starting`), a gap (`out_of_order`), or a batch that is not
  answered in time sends everything from `base` on again (go back N). Nothing is reordered.
* kvd answers what it sees again as it answered it first, for the last `items_max` items: no more
  than those are under way, so the code of an item is its code whichever reply brings it.
* After a reconnect to the same kvd everything from `base` on is sent again; for a new kvd the
  announcement of the slots takes the place of everything before it (`pool_lost`).

Not thread-safe by itself: the client's lock is held around every call but `Ticket.wait`. No clock:
time is given, ns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from engine_shim.client.event_types import Batch, Entry, Flight, StreamCounts
from engine_shim.client.options import SECOND_NS
from engine_shim.client.tickets import Calls, Ticket
from kvd.wire.slot_items import SlotItem, UsedItem

HOLD_OFF_MIN_NS: Final = 20_000_000
HOLD_OFF_MAX_NS: Final = 500_000_000
RESEND_FACTOR_MAX: Final = 16
RIDE_NS: Final = 50_000_000
"""How long an event waits for company: long for a layer of a step, short for who looks at kvd."""

FLIGHTS_KEPT: Final = 4
"""Windows of unanswered batches that are remembered; a later reply is only counted."""

QUIET_MAX: Final = 2
"""Quiet batches that may be unanswered when another one goes: kvd takes its time with the answer,
and nothing is to wait for that."""

AGAIN_LATER: Final = frozenset({"busy", "starting", "stopping"})
"""Refusals of a whole batch after which it is sent again."""


class EventStream:
    """Everything that kvd has not acknowledged."""

    def __init__(self, lock: threading.Lock, window: int, resend_ns: int = 2 * SECOND_NS) -> None:
        """An empty stream that is not open: `replace` or `resume` opens it."""
        self._lock = lock
        self._window = window
        self._resend_ns = resend_ns
        self._entries: dict[int, Entry] = {}
        self._flights: dict[int, Flight] = {}
        self._base = self._cursor = self._end = self._high = 0
        self._due_end = self._ride_until = 0
        """Items before this number start a batch; those behind it ride, at most until then."""
        self._asked_end = 0
        """Somebody may wait for items before this number, whatever was said when they came."""
        self._turn = 0
        self._under_way = self._awaited_under_way = self._quiet_under_way = 0
        self._awaited_end = 0
        self._items_max = 1
        self._is_open = False
        self._hold_until = 0
        self._hold_off = HOLD_OFF_MIN_NS
        self._factor = 1
        self._gave_up = ""
        self.bytes = 0
        self.counts = StreamCounts()
        self.calls: Calls = deque()
        """What settled tickets want called, by whoever let the stream settle them."""

    def __len__(self) -> int:
        return len(self._entries)

    # Posting ----------------------------------------------------------------------------------

    def append(
        self, items: Sequence[SlotItem], sizes: Sequence[int], *, is_awaited: bool = True
    ) -> Ticket:
        """Number items and keep them until they are acknowledged.

        Args:
            sizes: encoded bytes of each.
            is_awaited: the answer will be waited for; batches without such items do not delay
                those with some.
        """
        ticket = self._append(items, sizes, None, is_awaited)
        self._due_end = self._end
        if is_awaited:
            self._awaited_end = self._end
        return ticket

    def append_riding(
        self,
        items: Sequence[SlotItem],
        sizes: Sequence[int],
        now: int,
        push: Callable[[], None],
    ) -> Ticket:
        """The same for items that start no batch; push: calls `push`, and rouses who sends."""
        if self._due_end == self._end:
            self._ride_until = now + RIDE_NS
        return self._append(items, sizes, push, False)

    def append_open(self, item: UsedItem, size: int, now: int, push: Callable[[], None]) -> Entry:
        """The same for one item that may be added to as long as it is open."""
        if self._due_end == self._end:
            self._ride_until = now + RIDE_NS
        return self._enter(item, size, self._ticket(1, push), False)

    def _append(
        self,
        items: Sequence[SlotItem],
        sizes: Sequence[int],
        push: Callable[[], None] | None,
        is_awaited: bool,
    ) -> Ticket:
        ticket = self._ticket(len(items), push)
        for item, size in zip(items, sizes, strict=True):
            self._enter(item, size, ticket, is_awaited)
        return ticket

    def _ticket(self, count: int, push: Callable[[], None] | None) -> Ticket:
        ticket = Ticket(self._lock, count, self.calls, push)
        if self._gave_up:
            ticket.give_up(self._gave_up)
        return ticket

    def _enter(self, item: SlotItem, size: int, ticket: Ticket, is_awaited: bool) -> Entry:
        entry = self._entries[self._end] = Entry(item, size, ticket, is_awaited)
        self._end += 1
        self.bytes += size
        return entry

    def push(self) -> bool:
        """Send riding items, too, as soon as may be; returns whether there were any."""
        had, self._due_end = self._due_end < self._end, self._end
        self._asked_end = self._end
        return had

    # Sessions ---------------------------------------------------------------------------------

    def mark(self) -> int:
        """The end of what is posted now, for `can_resume` and `replace`.

        What is told from here on is told behind it.
        """
        for entry in self._entries.values():
            entry.is_open = False
        return self._end

    def can_resume(self, next_no: int) -> bool:
        """Whether a kvd that expects this number has seen what it acknowledged, and no more."""
        return self._base <= next_no <= self._high

    def resume(self, next_no: int, items_max: int) -> None:
        """The same kvd again: it gets everything that it has not answered. Opens the stream.

        Args: items_max: items that kvd takes in a batch, and remembers.
        """
        assert self.can_resume(next_no)
        self._open(items_max)

    def replace(self, next_no: int, mark: int, items_max: int) -> None:
        """Another kvd, which was told of the slots when `mark` was taken: that takes the place of
        what was posted before. Later items are numbered from `next_no`. Opens the stream.
        """
        for number in [number for number in self._entries if number < mark]:
            self.counts.replaced += 1
            self._settle(number, "pool_lost")
        self._entries = dict(enumerate(self._entries.values(), next_no))
        self._base = self._high = next_no
        self._end = next_no + len(self._entries)
        self._open(items_max)

    def _open(self, items_max: int) -> None:
        self._items_max = items_max
        self._due_end = self._awaited_end = self._asked_end = self._end
        self._flights.clear()
        self._rewind()
        self._is_open = True
        self._hold_until = 0
        self._hold_off = HOLD_OFF_MIN_NS
        self._factor = 1
        self._gave_up = ""
        for entry in self._entries.values():
            entry.ticket.resume()

    def close(self) -> None:
        """The connection is gone: nothing is sent; posting goes on."""
        self._is_open = False
        self._flights.clear()

    def give_up(self, code: str) -> None:
        """Nobody will acknowledge in foreseeable time: let go who waits, now and later."""
        self._gave_up = code
        for entry in self._entries.values():
            entry.ticket.give_up(code)

    # Sending ----------------------------------------------------------------------------------

    def is_due(self, now: int) -> bool:
        """Whether a batch may be sent now."""
        is_free = self._is_open and now >= self._hold_until and self._has_room
        return is_free and self._cursor < min(self._due_end, self._base + self._items_max)

    @property
    def _has_room(self) -> bool:
        """Whether the window lets another batch go; reports go ahead of none that is awaited."""
        if self._under_way < self._window and self._quiet_under_way < QUIET_MAX:
            return True
        is_awaited = self._cursor < self._awaited_end
        most = 2 * self._window
        return is_awaited and self._awaited_under_way < self._window and self._under_way < most

    @property
    def is_under_way(self) -> bool:
        """Whether a batch that is waited for has not been answered."""
        return self._awaited_under_way > 0

    def take(self, request_no: int, now: int, bytes_max: int) -> Batch:
        """The next batch, sent as `request_no` by whoever called; `is_due` was asked."""
        assert self.is_due(now)
        first, size = self._cursor, 0
        items: list[SlotItem] = []
        is_awaited = False
        for number in range(first, min(self._end, self._base + self._items_max)):
            entry = self._entries.get(number)
            if entry is None:
                break  # answered already, by a reply that overtook a lost one
            size += entry.size
            if items and size > bytes_max:
                break
            items.append(entry.item)
            entry.is_open = False
            is_awaited = is_awaited or entry.is_awaited
        end = self._cursor = first + len(items)
        self._due_end = max(self._due_end, end)  # should it get lost it is sent again by itself
        self.counts.sent += len(items)
        self.counts.resent += max(0, min(end, self._high) - first)
        self._high = max(self._high, end)
        is_quiet = not is_awaited and first >= self._asked_end
        self._under_way += not is_quiet
        self._awaited_under_way += is_awaited
        self._quiet_under_way += is_quiet
        flight = Flight(first, len(items), self._turn, now, is_awaited, is_quiet)
        self._flights[request_no] = flight
        while len(self._flights) > FLIGHTS_KEPT * self._window:
            del self._flights[next(iter(self._flights))]
        self._skip_answered()
        return Batch(first, items, is_quiet)

    def _skip_answered(self) -> None:
        """Move base and cursor on to items that are not answered."""
        while self._base < self._end and self._base not in self._entries:
            self._base += 1
        self._cursor = max(self._cursor, self._base)
        while self._cursor < self._end and self._cursor not in self._entries:
            self._cursor += 1

    def next_due(self) -> int | None:
        """When `tick` must be called next; None for never."""
        due = self._resend_due()
        if not self._is_open or self._due_end == self._end:
            return due
        return self._ride_until if due is None else min(due, self._ride_until)

    def _resend_due(self) -> int | None:
        if not self._is_open:
            return None
        if self._hold_until and self._cursor < self._due_end:
            return self._hold_until
        sent = [flight.sent_at for flight in self._flights.values() if flight.turn == self._turn]
        return min(sent) + self._resend_ns * self._factor if sent else None

    def tick(self, now: int) -> None:
        """Send again what is late; go on after a pause; nothing rides any longer than it may."""
        if now >= self._ride_until:
            self._due_end = self._end
        due = self._resend_due()
        if due is None or now < due:
            return
        if self._hold_until:
            self._hold_until = 0
        else:
            self._factor = min(2 * self._factor, RESEND_FACTOR_MAX)
            self._rewind()

    def _rewind(self) -> None:
        self._turn += 1
        self._under_way = self._awaited_under_way = self._quiet_under_way = 0
        self._cursor = self._base
        self._skip_answered()

    # Replies ----------------------------------------------------------------------------------

    def owns(self, request_no: int) -> bool:
        """Whether this request was a batch that has not been answered."""
        return request_no in self._flights

    def seen(self, request_no: int, next_no: int, codes: Sequence[str], since: int = -1) -> bool:
        """kvd has seen a batch, and everything before `next_no`.

        Args:
            codes: one for each item of the batch, () = all ''.
            since: number of the first item of quiet batches before it that are answered, too, each
                item with ''; -1 for none.
        Returns: False when the reply cannot be true: the session must be given up.
        """
        flight = self._flights.pop(request_no, None)
        if flight is None:
            self.counts.strays += 1
            return True
        end = flight.end
        if not end <= next_no <= self._high or (codes and len(codes) != flight.num_items):
            return False
        self._landed(flight)
        self._factor = 1
        self._hold_off = HOLD_OFF_MIN_NS
        if 0 <= since < flight.first_no:
            for number, other in list(self._flights.items()):
                if since <= other.first_no and other.end <= flight.first_no:
                    self._landed(self._flights.pop(number))
            self._acknowledge(range(max(since, self._base), flight.first_no), ())
        self._acknowledge(range(flight.first_no, end), codes)
        self._skip_answered()
        return True

    def _landed(self, flight: Flight) -> None:
        if flight.turn == self._turn:
            self._under_way -= not flight.is_quiet
            self._awaited_under_way -= flight.is_awaited
            self._quiet_under_way -= flight.is_quiet

    def _acknowledge(self, numbers: range, codes: Sequence[str]) -> None:
        for at, number in enumerate(numbers):
            if number in self._entries:
                code = codes[at] if codes else ""
                self.counts.acked += 1
                self.counts.refused += bool(code)
                self._settle(number, code)

    def _settle(self, number: int, code: str) -> None:
        entry = self._entries.pop(number)
        self.bytes -= entry.size
        entry.ticket.settle(code)

    def refused(self, request_no: int, code: str, want: str, now: int) -> bool:
        """kvd took nothing of this batch.

        Args: want: of `out_of_order`, the number that it expects.
        Returns: False when sending it again is of no use: the session must be given up.
        """
        flight = self._flights.pop(request_no)
        if code in AGAIN_LATER:
            if flight.turn == self._turn:
                self._rewind()
                self._hold_until = now + self._hold_off
                self._hold_off = min(2 * self._hold_off, HOLD_OFF_MAX_NS)
            return True
        # A gap is filled from `base` on. Anything else means that both count differently.
        if code != "out_of_order" or not want.isdecimal():
            return False
        if not self._base <= int(want) <= flight.first_no:
            return flight.turn != self._turn
        if flight.turn == self._turn:
            self._rewind()
        return True
