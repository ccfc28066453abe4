"""What the callers' threads and the client's own thread share, under one lock.

    connecting --> attached <--> lost --> failed      closed (from anywhere)
                       ^                    |
                       +------ retry -------+

The client's thread alone moves the state (but for `retry` and `close`, which ask it to). Leaving
*attached* ends every request under way at once; slot events stay, since what they report has
happened. `generation` grows with each new life of kvd: blocks of an older one are void.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from engine_shim.client.attaching import FileId
from engine_shim.client.errors import KvdRefused
from engine_shim.client.event_types import Entry
from engine_shim.client.events import RIDE_NS, EventStream
from engine_shim.client.gate_view import GateView
from engine_shim.client.options import SECOND_NS, ClientOptions, left_s
from engine_shim.client.requests import RequestTable
from engine_shim.client.retired import RetiredMappings
from engine_shim.client.slots import SlotBooks
from engine_shim.client.tickets import Ticket
from engine_shim.client.wakeup import Wakeup
from engine_shim.conditions import Condition
from kvd.wire.codec import Codec
from kvd.wire.messages import ClientFrame
from kvd.wire.slot_items import SlotItem, UsedItem
from kvd_kernels.host import Mapping

FRAME_ROOM: Final = 256
"""Bytes of an `events` frame beside its items, rounded up generously."""


FOREVER: Final = 1 << 63


class SessionLost(Exception):
    """The session is over; only a new attach helps."""

    def __init__(self, failure: KvdRefused) -> None:
        super().__init__(str(failure))
        self.failure = failure


class LinkState(Enum):
    """How the client stands with kvd."""

    CONNECTING = "connecting"
    ATTACHED = "attached"
    LOST = "lost"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Session:
    """One attach that kvd has said hello to."""

    boot_id: bytes
    token: bytes
    gate: GateView | None
    codec: Codec[ClientFrame]
    num_blocks: int
    block_stride: int
    items_max: int
    checksums: str = "off"

    @property
    def event_bytes_max(self) -> int:
        """Bytes of the items of one frame."""
        return self.codec.limit - FRAME_ROOM


SUMS_REGION: Final = ""
"""Name under which the pool's checksum area is kept beside the regions; no region has it."""


class MapCall(NamedTuple):
    """Request `number` for the memory of a region; it is answered on the attach connection."""

    number: int
    region: str


class Core:
    """The shared state."""

    def __init__(self, options: ClientOptions, num_slots: int, path: Path) -> None:
        """path: of the socket, for errors."""
        self.options = options
        self.path = path
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.changed = Condition(self.lock)
        """State or session changed."""
        self.room = Condition(self.lock)
        """A request ended, or events were acknowledged."""
        self.wakeup = Wakeup()
        self.sender: Callable[[], None] | None = None
        """Sends what is due; there while a session is served."""
        self.state = LinkState.CONNECTING
        self.session: Session | None = None
        self.generation = 0
        self.last_step = 0
        self.boot_id = b""
        self.failure: KvdRefused | None = None
        self.is_closing = False
        self.is_parting = False
        self.wants_retry = False
        self.books = SlotBooks(num_slots)
        self.stream = EventStream(self.lock, options.window, int(options.resend_s * SECOND_NS))
        self.requests = RequestTable(options.requests_max)
        self.outbox: deque[tuple[int, bytes]] = deque()
        self.map_calls: deque[MapCall] = deque()
        self.pool: Mapping | None = None
        self.pool_file: FileId = (0, 0)
        """Device and inode of the pool's file: a later kvd that took it over has the same."""
        self.regions: dict[str, Mapping] = {}
        self.region_files: dict[str, FileId] = {}
        self.retired = RetiredMappings()
        self.gate_waits: Counter[str] = Counter()
        self.gate_wakes = self.gate_spins = 0
        self.attaches = self.replies_malformed = self.queries = 0
        self.lost_at = 0
        self.sleeps_until = FOREVER
        """When the client's thread looks at the stream again, if nobody rouses it before."""
        self.reattach_ns = 0
        self._item_encoder = msgspec.msgpack.Encoder()
        self._item_decoder = msgspec.msgpack.Decoder(SlotItem)

    # Checks -----------------------------------------------------------------------------------

    @property
    def is_own_process(self) -> bool:
        """Whether this is the process that made the client, not a forked child."""
        return os.getpid() == self.pid

    def check_process(self) -> None:
        """Raises: KvdRefused(process_forked) in a child of the process that made the client."""
        here = os.getpid()
        if here != self.pid:
            raise KvdRefused("process_forked", maker=self.pid, user=here)

    def gone(self, detail: str) -> KvdRefused:
        """kvd cannot be reached any more, for this reason."""
        return KvdRefused("unreachable", path=self.path, detail=detail)

    def unreachable(self) -> KvdRefused:
        """Why nothing can be asked now."""
        if self.state is LinkState.CLOSED or self.is_closing:
            return KvdRefused("closed")
        return self.gone(_why(self.failure))

    def require_session(self) -> Session:
        """The session; the lock is held.

        Raises: KvdRefused(unreachable | closed).
        """
        if self.state is not LinkState.ATTACHED or self.session is None:
            raise self.unreachable()
        return self.session

    def sizes_of(self, items: Sequence[SlotItem]) -> list[int]:
        """Encoded bytes of each item, which kvd is sure to be able to read.

        Raises: KvdRefused(frame_malformed | frame_too_large).
        """
        session = self.session
        limit = session.event_bytes_max if session is not None else 0
        sizes = []
        for item in items:
            try:
                data = self._item_encoder.encode(item)
                self._item_decoder.decode(data)
            except (msgspec.DecodeError, OverflowError) as error:
                name = type(item).__name__
                raise KvdRefused("frame_malformed", detail=f"{name}: {error}") from error
            if limit and len(data) > limit:
                raise KvdRefused("frame_too_large", size=len(data), limit=limit)
            sizes.append(len(data))
        return sizes

    # Waiting ----------------------------------------------------------------------------------

    def await_gate(self, after: GateView | None, end: int) -> GateView:
        """The gate of the present session, once that is not `after` (whose connection ended).

        Raises: KvdRefused(unreachable | closed | deadline_exceeded).
        """
        with self.lock:
            while True:
                session = self.session
                if self.state is LinkState.ATTACHED and session is not None:
                    if session.gate is not None and session.gate is not after:
                        return session.gate
                elif self.state is not LinkState.LOST:
                    raise self.unreachable()
                left = left_s(end)
                if left == 0:
                    raise KvdRefused("deadline_exceeded", what=f"attaching to {self.path} again")
                self.changed.wait(left)

    def await_event_room(self, end: int) -> None:
        """Wait until not too much is unacknowledged; what ends work never has to wait for this.

        Raises: KvdRefused(busy | unreachable | closed).
        """
        if self._has_event_room():
            return
        with self.lock:
            while not self._has_event_room():
                self.push()
                left = left_s(end)
                if left == 0:
                    what = "slot events without acknowledgement"
                    raise KvdRefused("busy", limit=self.options.events_max, what=what)
                self.room.wait(left)

    def _has_event_room(self) -> bool:
        """Whether more may be posted; without the lock: as it was a moment ago.

        Raises: KvdRefused(unreachable | closed).
        """
        if self.is_closing or self.state is LinkState.FAILED or self.state is LinkState.CLOSED:
            raise self.unreachable()
        options, stream = self.options, self.stream
        return len(stream) < options.events_max and stream.bytes < options.event_bytes_max

    # Posting ----------------------------------------------------------------------------------

    def post(
        self,
        items: Sequence[SlotItem],
        sizes: Sequence[int],
        *,
        rides: bool = False,
        is_awaited: bool = True,
    ) -> Ticket:
        """Append slot events; the lock is held, and the books are changed in the same breath.

        The caller calls `send` once it has let go of the lock.

        rides: nobody waits for them, and a later event of the same tenancy takes them along.
        is_awaited: somebody is about to wait for the answer.
        """
        if rides:
            now = self._ride()
            return self.stream.append_riding(items, sizes, now, self.push)
        return self.stream.append(items, sizes, is_awaited=is_awaited)

    def post_open(self, item: UsedItem, size: int) -> Entry:
        """Append what rides and may be added to; the lock is held."""
        return self.stream.append_open(item, size, self._ride(), self.push)

    def _ride(self) -> int:
        """See to it that the client's thread looks in time at what rides from now on."""
        now = time.monotonic_ns()
        # An answer that somebody waits for will rouse it, too, and long before.
        if self.sleeps_until > now + RIDE_NS and not self.stream.is_under_way:
            self.wakeup.set()
        return now

    def send(self) -> None:
        """Send the slot events that were posted; the lock is not held.

        While kvd has not answered a batch that is waited for they wait, too: then the client's
        thread is awake anyway, and what was gathered meanwhile goes in one frame.
        """
        if self.sender is None or not self.stream.is_under_way:
            self.send_now()

    def send_now(self) -> None:
        """Send what is due in this thread, or let the client's thread do it; without the lock."""
        sender = self.sender
        if sender is None:
            self.wakeup.set()
        else:
            sender()

    def push(self) -> None:
        """Let nothing wait for company any more; the lock is held."""
        if self.stream.push():
            self.wakeup.set()

    # State ------------------------------------------------------------------------------------

    def set_state(self, state: LinkState) -> None:
        """Move on and wake whoever waits for that; the lock is held."""
        self.state = state
        self.changed.notify_all()
        self.room.notify_all()

    def lose(self, failure: KvdRefused) -> None:
        """The connection is gone: end every request, keep every event."""
        with self.lock:
            self.failure = failure
            self.lost_at = time.monotonic_ns()
            self.stream.close()
            self.set_state(LinkState.LOST)
            self._end_requests()
        self.run_calls()

    def fail(self, failure: KvdRefused) -> None:
        """Attaching is given up."""
        with self.lock:
            self.failure = failure
            self.set_state(LinkState.FAILED)
            self.stream.give_up("unreachable")
            self._end_requests()
        self.run_calls()

    def end(self) -> None:
        """The client's thread ends; nothing is answered any more."""
        with self.lock:
            self.set_state(LinkState.CLOSED)
            self.stream.close()
            self.stream.give_up("closed")
            self._end_requests()
        self.run_calls()

    def run_calls(self) -> None:
        """Call what waited for tickets that were settled; the lock is not held."""
        calls = self.stream.calls
        while calls:
            calls.popleft()()

    def _end_requests(self) -> None:
        error = self.unreachable()
        self.outbox.clear()
        self.map_calls.clear()
        self.requests.refuse_all(error.code, **error.context)

    def retire_gate(self, gate: GateView) -> None:
        """Close a gate page, keeping its counts; its sleepers move on."""
        gate.close()
        counts = gate.statistics()
        with self.lock:
            self.gate_wakes += counts.wakes
            self.gate_spins += counts.spins


def _why(failure: KvdRefused | None) -> str:
    if failure is None:
        return "the connection is lost"
    if failure.code == "unreachable":
        return failure.context["detail"]
    return f"{failure.code}: {failure.what}".rstrip(".")
