"""The client's own thread: it alone owns the sockets, and moves the state.

attempt, pause, attempt ... --> serve until the connection ends --> attempt ...
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Final

import zmq

from engine_shim.client.errors import KvdRefused
from engine_shim.client.greeting import Dealer, Greeted, Greeter, install
from engine_shim.client.identity import MemberIdentity, Sockets
from engine_shim.client.options import SECOND_NS, end_after, left_ns
from engine_shim.client.serving import SESSION_OVER, Serving
from engine_shim.client.session import Core, LinkState, SessionLost

STEADY_NS: Final = SECOND_NS
"""A session that ended sooner does not reset the pause between attempts."""

AGAIN: Final = SESSION_OVER | {
    "unreachable",
    "deadline_exceeded",
    "busy",
    "starting",
    "stopping",
    "engine_busy",
}
"""Refusals of an attempt that the next attempt may not meet; all others are final."""


class Link:
    """The thread, from the first attach to the end."""

    def __init__(self, core: Core, identity: MemberIdentity, sockets: Sockets) -> None:
        """Nothing runs before `start`."""
        self._core = core
        self._identity = identity
        self._sockets = sockets
        self._random = random.Random(os.urandom(16))
        self._backoff_s = core.options.backoff_min_s
        self._thread = threading.Thread(target=self._run, name="kvd-client", daemon=True)

    def start(self, connect_end: int) -> None:
        """Begin to attach; the first attach is tried until `connect_end`."""
        self._connect_end = connect_end
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended: `is_closing` was set, and the thread roused."""
        self._thread.join()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the client's thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        core = self._core
        end = self._connect_end
        context: zmq.Context[Dealer] = zmq.Context()
        greeter = Greeter(core, self._identity, self._sockets, context)
        try:
            while not (core.is_closing or core.is_parting):
                greeted = self._connect(greeter, end)
                if greeted is None:
                    self._await_retry()
                else:
                    self._serve(greeted)
                end = end_after(core.options.reconnect_deadline_s)
        finally:
            core.end()
            context.destroy(linger=0)

    def _connect(self, greeter: Greeter, end: int) -> Greeted | None:
        """Try until there is a session; None when that is given up."""
        core, options = self._core, self._core.options
        attempt_ns = int(options.attempt_s * SECOND_NS)
        cause: KvdRefused | None = None
        while not core.is_closing:
            attempt_end = min(end, time.monotonic_ns() + attempt_ns)
            try:
                greeted = greeter.attempt(attempt_end)
            except KvdRefused as failure:
                # An attempt that only the last deadline cut short says less than the one before.
                was_cut = failure.code == "deadline_exceeded" and attempt_end == end
                cause = cause if cause is not None and was_cut else failure
            else:
                install(core, greeted)
                return greeted
            pause_s = self._longer_pause()
            if cause.code not in AGAIN or left_ns(end) < pause_s * SECOND_NS:
                core.fail(cause)
                return None
            core.failure = cause
            self._pause(end_after(pause_s))
        return None

    def _longer_pause(self) -> float:
        """The next pause, up to half of it random so that members do not come in step."""
        pause_s = self._backoff_s * (1 - self._random.random() / 2)
        self._backoff_s = min(2 * self._backoff_s, self._core.options.backoff_max_s)
        return pause_s

    def _pause(self, end: int | None) -> None:
        """Wait until then, or until the client closes or (end None) is asked to retry."""
        core = self._core
        poller = zmq.Poller()
        poller.register(core.wakeup.fd, zmq.POLLIN)
        while not (core.is_closing or (end is None and core.wants_retry)):
            left = None if end is None else left_ns(end)
            if left == 0:
                return
            if poller.poll(None if left is None else -(-left // 1_000_000)):
                core.wakeup.clear()

    def _await_retry(self) -> None:
        core = self._core
        self._pause(None)
        with core.lock:
            core.wants_retry = False
            if not core.is_closing:
                core.set_state(LinkState.LOST)

    def _serve(self, greeted: Greeted) -> None:
        """Serve until the connection ends; then pause a moment before it is tried again."""
        core = self._core
        session = core.session
        assert session is not None
        began = time.monotonic_ns()
        try:
            Serving(core, self._identity.incarnation, greeted, session).run()
        except SessionLost as lost:
            core.lose(lost.failure)
        finally:
            # Sleepers learn of the end whatever its cause; the page stays for the announcement.
            greeted.attachment.hang_up()
            greeted.dealer.close(linger=0)
        if time.monotonic_ns() - began >= STEADY_NS:
            self._backoff_s = core.options.backoff_min_s
        if not core.is_parting:
            self._pause(end_after(self._longer_pause()))
