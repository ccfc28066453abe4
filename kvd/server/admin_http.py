"""HTTP for the admin API: thin routes, refusals as problem documents.

Loaded after the socket answers; see `admin.py`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from kvd.core.errors import KvdError
from kvd.server.api import Api
from kvd.server.doorman import LIVE_BODY
from kvd.server.problems import (
    PROBLEM_TYPE,
    method_not_allowed,
    parameter_invalid,
    problem_document,
)
from kvd.server.version_header import VERSION_HEADER

_BODY_BYTES_MAX: Final = 64 << 10
_STOP_SECONDS: Final = 1.0

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_runner(api: Api, version: str) -> web.AppRunner:
    """Make the server of an API, not yet set up."""

    async def add_version(_: web.Request, response: web.StreamResponse) -> None:
        response.headers[VERSION_HEADER] = version

    async def answer(request: web.Request) -> web.StreamResponse:
        given: dict[str, str] = {}
        for name, value in request.query.items():
            if name in given:
                raise parameter_invalid(name[:40], "it is given twice", "Give it once.")
            given[name] = value
        made = await api.answer(request.path, given)
        return web.Response(
            body=made.body, status=made.status, headers={"Content-Type": made.content_type}
        )

    app = web.Application(middlewares=[_refusals], client_max_size=_BODY_BYTES_MAX)
    app.on_response_prepare.append(add_version)
    app.router.add_get("/livez", _livez)
    app.router.add_get("/{path:.*}", answer)
    return web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_STOP_SECONDS)


async def _livez(_: web.Request) -> web.StreamResponse:
    return web.Response(body=LIVE_BODY, content_type="application/json", charset="utf-8")


@web.middleware
async def _refusals(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer refusals with their document."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except KvdError as error:
        refusal = error
    except web.HTTPMethodNotAllowed as error:
        allowed = sorted(error.allowed_methods)
        refusal = method_not_allowed(error.method[:40], request.path[:200], allowed)
        headers["Allow"] = ", ".join(allowed)
    body = json.dumps(problem_document(refusal)).encode()
    headers["Content-Type"] = PROBLEM_TYPE
    return web.Response(body=body, status=refusal.spec.status, headers=headers)
