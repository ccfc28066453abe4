"""The admin API on a UNIX socket: from the first probe to the last answer.

The daemon starts this before anything else: a probe must learn that kvd is alive, and how far it
is, while gigabytes are populated. At first a `Doorman` answers /livez and nothing is loaded that is
not needed for that; the HTTP library and what the answers are made of (models, views) are loaded in
a thread. Then the real server takes over the socket and everybody who waits at it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvd.core.errors import LocalError
from kvd.server.doorman import Doorman

if TYPE_CHECKING:
    from aiohttp import web

    from kvd.server.node_view import NodeView

SOCKET_MODE: Final = 0o600
"""Who may connect may see everything: the daemon's user and root."""

_BACKLOG: Final = 128


class AdminServer:
    """Serves the admin API on `path`."""

    def __init__(self, view: NodeView | None, path: Path, version: str = "") -> None:
        """Nothing listens before `start`.

        Args:
            view: the node; None when it does not exist yet, then `show` follows.
            path: of the socket; its directory exists, and nothing is there.
            version: told in answers before there is a node.
        """
        self._view = view
        self._path = path
        self._version = version if view is None else view.version
        self._shown = asyncio.Event()
        self._inode = 0
        self._listener: socket.socket | None = None
        self._opening: asyncio.Task[web.AppRunner] | None = None

    def show(self, view: NodeView) -> None:
        """The node exists now: answer about it."""
        self._view = view
        self._shown.set()

    async def start(self) -> None:
        """Listen and answer /livez from now on, everything else as soon as it is loaded.

        Raises: LocalError(runtime_dir_unusable): the socket cannot be made.
        Leaves: on an error nothing.
        """
        listener = self._listen()
        self._listener = listener
        if self._view is not None:
            self._shown.set()
        doorman = Doorman(listener, self._version, self._starting)
        self._opening = asyncio.create_task(self._open(listener, doorman), name="kvd-admin")

    def _starting(self) -> int | None:
        """Percent populated while the node starts, None once it does not."""
        if self._view is None:
            return 0
        phase = self._view.phase()
        return phase.percent if phase.name == "starting" else None

    async def opened(self) -> None:
        """Wait until everything is answered; raises what went wrong while it was loaded."""
        if self._opening is not None:
            await asyncio.shield(self._opening)

    async def stop(self) -> None:
        """Stop listening, let answers under way end, remove the socket. Idempotent."""
        if self._opening is None or self._listener is None:
            return
        opening, self._opening = self._opening, None
        if not self._shown.is_set():
            opening.cancel()  # there never was a node to answer about
        try:
            with suppress(asyncio.CancelledError):
                await (await opening).cleanup()
        finally:
            self._listener.close()
            with suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()

    async def _open(self, listener: socket.socket, doorman: Doorman) -> web.AppRunner:
        """Load the server, and let it take over."""
        loop = asyncio.get_running_loop()
        with ExitStack() as undo:
            undo.callback(_hang_up, doorman)
            await loop.run_in_executor(None, _preload)
            await self._shown.wait()
            assert self._view is not None
            runner = _make_runner(self._view)
            await runner.setup()
            undo.pop_all()
        from aiohttp import web  # loaded by now

        waiting = doorman.relieve()
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        assert runner.server is not None
        for connection in waiting:
            await loop.connect_accepted_socket(runner.server, connection)
        return runner

    def _listen(self) -> socket.socket:
        """Make the socket; nobody can connect before its mode is set, since it listens later."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setblocking(False)
        try:
            listener.bind(os.fspath(self._path))
            self._path.chmod(SOCKET_MODE)
            self._inode = self._path.stat().st_ino
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            detail = f"{self._path.name} cannot be made: {error.strerror or error}"
            raise LocalError(
                "runtime_dir_unusable", path=self._path.parent, detail=detail
            ) from error
        return listener


def _hang_up(doorman: Doorman) -> None:
    for connection in doorman.relieve():
        connection.close()


def _preload() -> None:
    """Load what answers; runs in a worker thread."""
    import kvd.server.admin_http  # noqa: F401
    from kvd.server.api import prepare

    prepare()


def _make_runner(view: NodeView) -> web.AppRunner:
    from kvd.server.admin_http import make_runner
    from kvd.server.api import Api

    return make_runner(Api(view), view.version)
