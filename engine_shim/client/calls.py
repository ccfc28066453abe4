"""One request and its reply, for any thread: issue, hand over, sleep until the deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from engine_shim.client.errors import KvdRefused
from engine_shim.client.options import end_after, left_ms, left_s
from engine_shim.client.requests import Pending
from engine_shim.client.session import Core, LinkState, MapCall, Session
from kvd.wire.codec import FrameError
from kvd.wire.messages import Answered, ClientFrame
from kvd_kernels.host import Mapping

Reply = TypeVar("Reply", bound=Answered)

Make = Callable[[int, bytes, int], ClientFrame]
"""Makes the frame from request_no, token and deadline_ms_left."""


class Caller:
    """How calls reach the client's thread."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def end(self, deadline_s: float | None) -> int:
        """The deadline of a call, ns of the monotonic clock; None for the default."""
        return end_after(self._core.options.deadline_s if deadline_s is None else deadline_s)

    def call(self, make: Make, kind: type[Reply], what: str, end: int) -> Reply:
        """Ask, and wait for the reply.

        Args: kind: of the reply; what: for errors; end: deadline, ns.
        Raises: KvdRefused.
        """
        core = self._core
        session, pending = self._begin(what, end)
        try:
            data = session.codec.encode(make(pending.number, session.token, left_ms(end)))
        except FrameError as error:
            refusal = KvdRefused(error.code, **error.context)
            with core.lock:
                core.requests.refuse(pending.number, refusal)
                core.room.notify_all()
            raise refusal from error
        with core.lock:
            if self._is_present(session):
                core.outbox.append((pending.number, data))
        core.send_now()
        reply = self._await(pending, end)
        if not isinstance(reply, kind):
            detail = f"{what} got the reply {type(reply).__name__}"
            raise KvdRefused("frame_malformed", detail=detail)
        return reply

    def map_region(self, name: str, end: int) -> Mapping:
        """The memory of a region, mapped once for all callers.

        Raises: KvdRefused.
        """
        core = self._core
        session, pending = self._begin(f"mapping region {name}", end)
        with core.lock:
            if self._is_present(session):
                core.map_calls.append(MapCall(pending.number, name))
        core.wakeup.set()
        self._await(pending, end)
        with core.lock:
            mapping = core.regions.get(name)
            if mapping is None:
                raise KvdRefused("pool_lost", what=f"region {name}")
            return mapping

    def _begin(self, what: str, end: int) -> tuple[Session, Pending]:
        """Wait for a place among the requests under way."""
        core = self._core
        core.check_process()
        with core.lock:
            session = core.require_session()
            while not core.requests.has_room:
                left = left_s(end)
                if left == 0:
                    limit = core.options.requests_max
                    raise KvdRefused("busy", limit=limit, what="requests under way")
                core.room.wait(left)
                session = core.require_session()
            return session, core.requests.issue(what)

    def _is_present(self, session: Session) -> bool:
        """Whether the session still lives; else the request has ended with it."""
        core = self._core
        return core.session is session and core.state is LinkState.ATTACHED

    def _await(self, pending: Pending, end: int) -> Answered | None:
        core = self._core
        if not pending.wait(left_s(end)):
            with core.lock:
                if core.requests.give_up(pending):
                    core.room.notify_all()
                    raise KvdRefused("deadline_exceeded", what=pending.what)
        if pending.error is not None:
            raise pending.error
        return pending.reply
