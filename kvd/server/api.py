"""Answers of the admin API, without HTTP: a path and its parameters in, a body out.

Loaded after the socket answers (see `admin.py`). One piece of work runs at a time: it is done in
slices, and two at once would only make both late.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar, cast

from kvd.core.errors import KvdError
from kvd.server import models, models_tables
from kvd.server.models import Model, Readiness
from kvd.server.node_view import NodeView
from kvd.server.openapi import describe_api
from kvd.server.problems import path_unknown
from kvd.server.routes import ROUTES, STORY_PREFIX
from kvd.server.sliced import Work, run_sliced
from kvd.server.views import Watch, readiness, status
from kvd.server.views_story import config_page, story_page, story_text_of
from kvd.server.views_tables import (
    BlockQuery,
    EngineQuery,
    SlotQuery,
    block_page,
    engine_page,
    slot_page,
)

if TYPE_CHECKING:
    from kvd.server.metrics import Samples

T = TypeVar("T")

WAITING_MAX: Final = 32
"""Requests that wait for their turn; one more is answered busy."""

METRICS_KEY: Final = "metrics.enabled"

_Values = Mapping[str, int | str]


class Answer(NamedTuple):
    """A response that is not a refusal."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"


class Api:
    """Answers requests from a node."""

    def __init__(
        self,
        view: NodeView,
        watch: Watch | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._view = view
        self._watch = watch or Watch()
        self._wall_clock = wall_clock
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._openapi = b""
        self._routes: Final = {route.path: route for route in ROUTES}
        self._handlers: Final[dict[str, Callable[[_Values], Awaitable[Answer]]]] = {
            "/readyz": self._readyz,
            "/v1/status": self._status,
            "/v1/slots": self._slots,
            "/v1/blocks": self._blocks,
            "/v1/engines": self._engines,
            "/v1/config": self._config,
            "/metrics": self._metrics,
            "/openapi.json": self._describe,
        }

    async def answer(self, path: str, given: Mapping[str, str]) -> Answer:
        """Answer a GET of one of the paths in `ROUTES`.

        Args:
            path: decoded; a story's id is everything behind its prefix.
            given: query parameters.

        Raises: KvdError: a refusal, with its HTTP status.
        """
        if path.startswith(STORY_PREFIX) and path != STORY_PREFIX:
            values = self._routes[STORY_PREFIX + "{id}"].read(given)
            return await self._story(path.removeprefix(STORY_PREFIX), values)
        handler = self._handlers.get(path)
        if handler is None:
            raise path_unknown(path)
        return await handler(self._routes[path].read(given))

    async def _run(self, work: Work[T]) -> T:
        """Do a piece of work when it is its turn."""
        if self._waiting >= WAITING_MAX:
            raise KvdError("busy", limit=WAITING_MAX, what="requests of the admin API")
        self._waiting += 1
        try:
            async with self._turn:
                return await run_sliced(work)
        finally:
            self._waiting -= 1

    async def _readyz(self, _: _Values) -> Answer:
        found: Readiness = await self._run(readiness(self._view, self._watch))
        return _json(found, 200 if found.ready else 503)

    async def _status(self, _: _Values) -> Answer:
        return _json(await self._run(status(self._view, self._watch, self._wall_clock())))

    async def _slots(self, values: _Values) -> Answer:
        query = SlotQuery(
            limit=cast(int, values["limit"]),
            after=str(values["after"]),
            engine=str(values["engine"]),
            member=str(values["member"]),
            state=str(values["state"]),
        )
        return _json(await self._run(slot_page(self._view, query)))

    async def _blocks(self, values: _Values) -> Answer:
        state = "" if values["state"] == "all" else str(values["state"])
        query = BlockQuery(
            limit=cast(int, values["limit"]),
            after=str(values["after"]),
            engine=str(values["engine"]),
            state=cast(Literal["free", "filling", "ready", "poisoned", "used", ""], state),
        )
        return _json(await self._run(block_page(self._view, query)))

    async def _engines(self, values: _Values) -> Answer:
        query = EngineQuery(cast(int, values["limit"]), str(values["after"]))
        return _json(await self._run(engine_page(self._view, query)))

    async def _story(self, wanted: str, values: _Values) -> Answer:
        page = await self._run(story_page(self._view, wanted, cast(int, values["limit"])))
        if values["format"] == "text":
            return Answer(story_text_of(page).encode(), content_type="text/plain")
        return _json(page)

    async def _config(self, _: _Values) -> Answer:
        return _json(config_page(self._view))

    async def _metrics(self, _: _Values) -> Answer:
        rows = {row.key: row.value for row in self._view.config_rows()}
        if rows.get(METRICS_KEY) == "false":
            raise KvdError("not_found", what=f"/metrics ({METRICS_KEY} is false)")
        loop = asyncio.get_running_loop()
        scraper = await loop.run_in_executor(None, _load_scraper)
        samples = await self._run(scraper.gather(self._view, self._watch))
        body = await self._run(scraper.expose(samples))
        return Answer(body, content_type=scraper.content_type)

    async def _describe(self, _: _Values) -> Answer:
        if not self._openapi:
            loop = asyncio.get_running_loop()
            document = await loop.run_in_executor(None, describe_api, self._view.version)
            self._openapi = json.dumps(document, indent=1).encode()
        return Answer(self._openapi)


def _json(model: Model, status: int = 200) -> Answer:
    return Answer(model.model_dump_json().encode(), status)


class _Scraper(NamedTuple):
    """What /metrics needs of `metrics.py`."""

    gather: Callable[[NodeView, Watch], Work[Samples]]
    expose: Callable[[Samples], Work[bytes]]
    content_type: str


def _load_scraper() -> _Scraper:
    """Load the metrics, whose library is slow to load, when somebody scrapes; in a thread."""
    from kvd.server.metrics import CONTENT_TYPE, expose, gather

    return _Scraper(gather, expose, CONTENT_TYPE)


def prepare() -> None:
    """Build the models, which are built when first used, so that no request waits for it."""
    for module in (models, models_tables):
        for found in vars(module).values():
            if isinstance(found, type) and issubclass(found, Model):
                found.model_rebuild()
