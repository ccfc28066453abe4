"""The admin API over HTTP on a UNIX socket: thin routes, refusals as problem documents.

The daemon starts this before anything else: a probe must learn that kvd is alive, and how far it
is, while gigabytes are populated. What the answers are made of (models, views, metrics) is loaded
in a thread once the socket listens; until then only /livez answers at once, the rest waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kvd.core.errors import KvdError, LocalError
from kvd.server.problems import (
    PROBLEM_TYPE,
    method_not_allowed,
    parameter_invalid,
    problem_document,
)
from kvd.server.version_header import VERSION_HEADER

if TYPE_CHECKING:
    from kvd.server.api import Api
    from kvd.server.node_view import NodeView

SOCKET_MODE: Final = 0o600
"""Who may connect may see everything: the daemon's user and root."""

_BACKLOG: Final = 128
_BODY_BYTES_MAX: Final = 64 << 10
_STOP_SECONDS: Final = 1.0

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminServer:
    """Serves the admin API on `path`."""

    def __init__(self, view: NodeView, path: Path) -> None:
        """Nothing listens before `start`.

        Args:
            view: the node.
            path: of the socket; its directory exists, and nothing is there.
        """
        self._view = view
        self._path = path
        self._runner: web.AppRunner | None = None
        self._loading: asyncio.Future[Api] | None = None
        self._inode = 0

    async def start(self) -> None:
        """Listen, and begin to load what the answers are made of.

        Raises: LocalError(runtime_dir_unusable): the socket cannot be made.
        Leaves: on an error nothing.
        """
        listener = self._bind()
        app = web.Application(middlewares=[_refusals], client_max_size=_BODY_BYTES_MAX)
        app.on_response_prepare.append(self._add_version)
        app.router.add_get("/livez", _livez)
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=_STOP_SECONDS
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        self._runner = runner
        loop = asyncio.get_running_loop()
        self._loading = loop.run_in_executor(None, _load, self._view)

    async def stop(self) -> None:
        """Stop listening, let answers under way end, remove the socket. Idempotent."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        await runner.cleanup()
        if self._loading is not None:
            await asyncio.wait([self._loading])
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _bind(self) -> socket.socket:
        """Make the socket; nobody can connect before its mode is set, since it listens later."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setblocking(False)
        try:
            listener.bind(os.fspath(self._path))
            self._path.chmod(SOCKET_MODE)
            status = self._path.stat()
        except OSError as error:
            listener.close()
            detail = f"{self._path.name} cannot be made: {error.strerror or error}"
            raise LocalError(
                "runtime_dir_unusable", path=self._path.parent, detail=detail
            ) from error
        assert stat.S_ISSOCK(status.st_mode)
        self._inode = status.st_ino
        return listener

    async def _add_version(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers[VERSION_HEADER] = self._view.version

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert self._loading is not None
        api = await asyncio.shield(self._loading)
        given: dict[str, str] = {}
        for name, value in request.query.items():
            if name in given:
                raise parameter_invalid(name[:40], "it is given twice", "Give it once.")
            given[name] = value
        answer = await api.answer(request.path, given)
        return web.Response(
            body=answer.body, status=answer.status, headers={"Content-Type": answer.content_type}
        )


async def _livez(_: web.Request) -> web.StreamResponse:
    return web.json_response({"alive": True})


@web.middleware
async def _refusals(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer refusals with their document."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except KvdError as error:
        refusal = error
    except web.HTTPMethodNotAllowed as error:
        refusal = method_not_allowed(
            error.method[:40], request.path[:200], sorted(error.allowed_methods)
        )
        headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    body = json.dumps(problem_document(refusal)).encode()
    headers["Content-Type"] = PROBLEM_TYPE
    return web.Response(body=body, status=refusal.spec.status, headers=headers)


def _load(view: NodeView) -> Api:
    """Load what the answers are made of; runs in a worker thread."""
    from kvd.server.api import Api, prepare

    prepare()
    return Api(view)
