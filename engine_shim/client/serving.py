"""The life of one session: frames to and from kvd until the connection ends.

One wait for everything: frames, the attach connection, callers (an eventfd) and the next repetition
of an event batch. It runs on the client's thread, which alone reads; but whoever posts something
sends it himself when the socket is free: rousing a thread for it takes longer than the sending.
The socket is touched in a *turn* only, a lock that is never held while anybody waits, and taken
before the client's lock, never after it.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from typing import Final

import zmq

from engine_shim.client.errors import KvdRefused
from engine_shim.client.events import RIDE_NS
from engine_shim.client.greeting import Dealer, Greeted
from engine_shim.client.options import left_ns
from engine_shim.client.region_calls import RegionCalls
from engine_shim.client.session import Core, Session, SessionLost
from kvd.wire.codec import FrameError, server_codec
from kvd.wire.messages import Answer, Error, Events, Query, Seen, ServerFrame

EVENTS_DEADLINE_MS: Final = 600_000
"""Slot events never expire; the field must be filled."""

ANSWER_DEADLINE_MS: Final = 10_000
ANSWERS_MAX: Final = 1024
_IN: Final = int(zmq.POLLIN)
_OUT: Final = int(zmq.POLLOUT)

IDLE_NS: Final = 1_000_000_000
"""How long the thread sleeps when nothing is due."""

FRAMES_PER_TURN: Final = 64
"""Frames read before callers are served again."""

SESSION_OVER: Final = frozenset(
    {"unauthorized", "stale_boot", "stale_incarnation", "engine_unknown"}
)
"""Refusals of any request that only a new attach can cure."""


class Serving:
    """One session's traffic."""

    def __init__(self, core: Core, incarnation: int, greeted: Greeted, session: Session) -> None:
        self._core = core
        self._incarnation = incarnation
        self._session = session
        self._sock = greeted.attachment.sock
        self._dealer: Dealer = greeted.dealer
        self._regions = RegionCalls(core, self._sock)
        self._poll = select.poll()
        for fd in (self._sock.fileno(), core.wakeup.fd, self._dealer.FD):
            self._poll.register(fd, select.POLLIN)
        self._decode = server_codec(1 << 62).decode
        self._answers: set[int] = set()
        self._blocked: deque[bytes] = deque()
        self._was_busy = False
        self._turn = threading.Lock()
        self._lost: SessionLost | None = None
        self._is_over = False

    def run(self) -> None:
        """Serve until the client closes.

        Raises: SessionLost.
        """
        core = self._core
        core.sender = self._send_now
        try:
            while not core.is_closing:
                self._serve_once()
        finally:
            core.sender = None
            with self._turn:
                self._is_over = True

    def _serve_once(self) -> None:
        core, gate = self._core, self._session.gate
        with self._turn:
            if self._lost is not None:
                raise self._lost
            wait_ms = self._send_due()
            ready = self._ready()
        fds = [fd for fd, _ in self._poll.poll(0 if ready else wait_ms)]
        if core.wakeup.fd in fds:
            core.wakeup.clear()
        self._read_frames()
        if self._sock.fileno() in fds:
            self._regions.read()
        if gate is not None and gate.is_suspect:
            raise SessionLost(core.gone("a wait on the gate page ended"))

    def _ready(self) -> bool:
        """Whether the dealer can go on now; its descriptor tells only of changes."""
        return bool(self._events() & (_IN | _OUT if self._blocked else _IN))

    def _events(self) -> int:
        events = self._dealer.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return events

    # Sending ----------------------------------------------------------------------------------

    def _send_now(self) -> None:
        """Send what is due in the caller's thread, or let the client's thread do it."""
        core = self._core
        if not self._turn.acquire(blocking=False):
            core.wakeup.set()
            return
        try:
            if self._is_over:
                return
            self._send_frames()
            must_look = bool(self._blocked) or self._ready()
        except SessionLost as lost:
            self._lost, must_look = lost, True
        finally:
            self._turn.release()
        with core.lock:
            due = core.stream.next_due()
            must_look = must_look or (due is not None and due < core.sleeps_until)
        if must_look:
            core.wakeup.set()

    def _send_due(self) -> int | None:
        """Send everything that may be sent now; returns how long to wait for more, ms.

        None: until the socket takes more.
        """
        core = self._core
        if not self._send_frames():
            return None
        self._regions.ask()
        with core.lock:
            due = core.stream.next_due()
            if self._was_busy:
                # What is posted or sent by others now need not rouse us: we look again soon.
                soon = time.monotonic_ns() + RIDE_NS
                due = soon if due is None else min(due, soon)
            self._was_busy = False
            # Not for ever: whoever sends something need not rouse us for what is due much later.
            soon = time.monotonic_ns() + IDLE_NS
            core.sleeps_until = due = soon if due is None else min(due, soon)
        return -(-left_ns(due) // 1_000_000)

    def _send_frames(self) -> bool:
        """Send every frame that may be sent now; False when the socket takes no more."""
        while self._blocked:
            if not self._try_send(self._blocked[0]):
                return False
            self._blocked.popleft()
        while True:
            data = self._next_events() or self._next_request()
            if data is None:
                return True
            self._was_busy = True
            if not self._try_send(data):
                self._blocked.append(data)
                return False

    def _try_send(self, data: bytes) -> bool:
        try:
            self._dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _next_events(self) -> bytes | None:
        core, session = self._core, self._session
        with core.lock:
            now = time.monotonic_ns()
            core.stream.tick(now)
            if not core.stream.is_due(now):
                return None
            number = core.requests.number()
            batch = core.stream.take(number, now, session.event_bytes_max)
        frame = Events(
            number,
            session.token,
            EVENTS_DEADLINE_MS,
            session.boot_id,
            self._incarnation,
            batch.first_no,
            batch.items,
            batch.is_quiet,
        )
        try:
            return session.codec.encode(frame)
        except FrameError as error:
            # Only an item that an earlier kvd, with a larger limit, would have taken.
            raise SessionLost(KvdRefused(error.code, **error.context)) from error

    def _next_request(self) -> bytes | None:
        core = self._core
        with core.lock:
            while core.outbox:
                number, data = core.outbox.popleft()
                if core.requests.is_open(number):
                    return data
        return None

    # Receiving --------------------------------------------------------------------------------

    def _read_frames(self) -> None:
        """Read what is there; what waited for a frame is called before the next one is read."""
        for _ in range(FRAMES_PER_TURN):
            with self._turn:
                # Asked for, since an exception for its absence costs more than a frame.
                if not self._events() & _IN:
                    break
                self._was_busy = True
                self._read_frame(self._dealer.recv_multipart(zmq.NOBLOCK))
            self._core.run_calls()
        self._core.run_calls()

    def _read_frame(self, parts: list[bytes]) -> None:
        core = self._core
        try:
            if len(parts) != 1:
                raise FrameError("frame_malformed", {"detail": f"{len(parts)} parts, not 1"})
            frame = self._decode(parts[0])
        except FrameError as error:
            with core.lock:
                core.replies_malformed += 1
                if core.requests.is_open(error.request_no):
                    core.requests.refuse(error.request_no, KvdRefused(error.code, **error.context))
                    core.room.notify_all()
            return
        if frame.boot_id != self._session.boot_id:
            raise SessionLost(core.gone("another life of kvd answers"))
        if isinstance(frame, Query):
            self._answer(frame)
            return
        with core.lock:
            self._reply(frame)
            core.room.notify_all()

    def _reply(self, frame: ServerFrame) -> None:
        """A reply to events, to a request, or to an answer of ours; the lock is held."""
        core, number = self._core, frame.request_no
        if number in self._answers:
            self._answers.discard(number)
        elif isinstance(frame, Seen):
            if not core.stream.seen(number, frame.next_no, frame.codes, frame.since):
                raise SessionLost(core.gone("it acknowledges events that it was not sent"))
        elif not isinstance(frame, Error):
            core.requests.answer(number, frame)
        elif core.stream.owns(number):
            now, want = time.monotonic_ns(), frame.context.get("want", "")
            if not core.stream.refused(number, frame.code, want, now):
                raise SessionLost(KvdRefused(frame.code, **frame.context))
        else:
            core.requests.refuse(number, KvdRefused(frame.code, **frame.context))
        if isinstance(frame, Error) and frame.code in SESSION_OVER:
            raise SessionLost(KvdRefused(frame.code, **frame.context))

    def _answer(self, query: Query) -> None:
        """Tell the truth about one of our holds; should it get lost, kvd asks again."""
        core, session = self._core, self._session
        with core.lock:
            core.queries += 1
            truth = core.books.truth(query.slot, query.epoch, query.kind, query.owner)
            number = core.requests.number()
        if len(self._answers) >= ANSWERS_MAX:
            self._answers.clear()  # their replies were lost; late ones only count as unknown
        self._answers.add(number)
        answer = Answer(
            number,
            session.token,
            ANSWER_DEADLINE_MS,
            session.boot_id,
            self._incarnation,
            query.slot,
            query.epoch,
            query.kind,
            query.owner,
            truth,
        )
        self._blocked.append(session.codec.encode(answer))
