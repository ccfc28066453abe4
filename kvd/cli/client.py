"""The admin API for programs: typed calls over the UNIX socket; the only file with paths of it.

One connection is kept from call to call and made again when kvd closed it in between. Nothing here
waits for long: a socket that nobody listens on answers at once, a kvd that hangs is given up on.
"""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar
from urllib.parse import quote, urlencode

from pydantic import ValidationError

from kvd import __version__
from kvd.core.errors import ErrorSpec, KvdError, Retry
from kvd.server.models import Model, Problem, Readiness, Status
from kvd.server.models_tables import BlockPage, ConfigPage, EnginePage, SlotPage, StoryPage
from kvd.server.version_header import VERSION_HEADER

CONNECT_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 5.0
"""A kvd that does not answer for so long hangs: its answers take milliseconds."""

PAGE_ITEMS: Final = 500
"""Items asked for at once, the most that kvd gives on a page."""

_BODY_BYTES_MAX: Final = 64 << 20

M = TypeVar("M", bound=Model)

_Values = Mapping[str, str | int]


class RefusedError(KvdError):
    """kvd answered with a refusal; it carries the code and the sentences that kvd sent."""

    def __init__(self, problem: Problem) -> None:
        # The row comes from kvd: a newer one may know codes that this side does not.
        self.spec = ErrorSpec(problem.code, problem.status, Retry.NEVER, "{detail}", "{remedy}")
        self.context = {"detail": problem.detail, "remedy": problem.remedy}
        Exception.__init__(self, problem.code, self.context)


class AdminClient:
    """Asks one kvd. Not for use by several threads at once."""

    def __init__(
        self,
        path: Path,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Nothing is connected before the first call.

        Args:
            path: of admin.sock.
            answer_seconds: how long an answer may take.
            warn: is told, once, when kvd has another version than this program.
        """
        self._path = path
        self._connection = _UnixConnection(path, answer_seconds)
        self._answer_seconds = answer_seconds
        self._warn = warn
        self._their_version = ""

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a further call opens a new one."""
        self._connection.close()

    @property
    def their_version(self) -> str:
        """Version of the kvd that answered last, '' before."""
        return self._their_version

    # Calls. Each raises KvdError(unreachable), KvdError(protocol_mismatch) or RefusedError.

    def status(self) -> Status:
        """The node at one look."""
        return self._get(Status, "/v1/status")

    def readiness(self) -> Readiness:
        """Whether the node should get new work, and why not."""
        return self._get(Readiness, "/readyz", also=(503,))

    def slots(
        self,
        limit: int,
        *,
        after: str = "",
        engine: str = "",
        member: str = "",
        state: str = "",
    ) -> SlotPage:
        """Slots in order, as many pages as `limit` items need."""
        page = SlotPage(items=[], next=after or None)
        while True:
            values: _Values = {
                "limit": min(PAGE_ITEMS, limit - len(page.items)),
                "after": page.next or "",
                "engine": engine,
                "member": member,
                "state": state,
            }
            more = self._get(SlotPage, "/v1/slots", values)
            page = SlotPage(items=page.items + more.items, next=more.next)
            if page.next is None or len(page.items) >= limit:
                return page

    def blocks(
        self, limit: int, *, after: str = "", engine: str = "", state: str = "used"
    ) -> BlockPage:
        """Blocks in order, as many pages as `limit` items need; state `all` for all."""
        page = BlockPage(items=[], next=after or None, total=0)
        while True:
            values: _Values = {
                "limit": min(PAGE_ITEMS, limit - len(page.items)),
                "after": page.next or "",
                "engine": engine,
                "state": state,
            }
            more = self._get(BlockPage, "/v1/blocks", values)
            page = BlockPage(items=page.items + more.items, next=more.next, total=more.total)
            if page.next is None or len(page.items) >= limit:
                return page

    def engines(self) -> EnginePage:
        """All engines."""
        page = EnginePage(items=[], next=None)
        while True:
            values: _Values = {"limit": PAGE_ITEMS, "after": page.next or ""}
            more = self._get(EnginePage, "/v1/engines", values)
            page = EnginePage(items=page.items + more.items, next=more.next)
            if page.next is None:
                return page

    def story(self, wanted: str, limit: int) -> StoryPage:
        """The latest transitions about one thing."""
        return self._get(StoryPage, f"/v1/story/{quote(wanted, safe='')}", {"limit": limit})

    def config(self) -> ConfigPage:
        """Every key of the configuration."""
        return self._get(ConfigPage, "/v1/config")

    # Underneath -------------------------------------------------------------------------------

    def _get(
        self,
        model: type[M],
        path: str,
        values: _Values | None = None,
        also: tuple[int, ...] = (),
    ) -> M:
        given = {name: value for name, value in (values or {}).items() if value != ""}
        target = f"{path}?{urlencode(given)}" if given else path
        status, body = self._ask(target)
        try:
            if status == 200 or status in also:
                return model.model_validate_json(body)
            problem = Problem.model_validate_json(body)
        except ValidationError as error:
            theirs = self._their_version or "unknown"
            raise KvdError("protocol_mismatch", theirs=theirs, ours=__version__) from error
        raise RefusedError(problem)

    def _ask(self, target: str) -> tuple[int, bytes]:
        """Send a request, once more when kvd had closed the kept connection."""
        was_open = self._connection.sock is not None
        try:
            return self._ask_once(target)
        except (http.client.RemoteDisconnected, ConnectionError) as error:
            self.close()
            if not was_open:
                raise self._unreachable(error) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unreachable(error) from error
        try:
            return self._ask_once(target)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unreachable(error) from error

    def _ask_once(self, target: str) -> tuple[int, bytes]:
        headers = {VERSION_HEADER: __version__, "Accept": "application/json"}
        self._connection.request("GET", target, headers=headers)
        response = self._connection.getresponse()
        if (response.length or 0) > _BODY_BYTES_MAX:
            raise http.client.LineTooLong("body")
        body = response.read()
        self._hear_version(response.getheader(VERSION_HEADER, ""))
        return response.status, body

    def _hear_version(self, theirs: str) -> None:
        if theirs and theirs not in (__version__, self._their_version) and self._warn is not None:
            self._warn(
                f"kvd is version {theirs}, this program {__version__}: figures may be missing. "
                "Install matching versions."
            )
        self._their_version = theirs

    def _unreachable(self, error: OSError | http.client.HTTPException) -> KvdError:
        return KvdError("unreachable", path=self._path, detail=self._why(error))

    def _why(self, error: OSError | http.client.HTTPException) -> str:
        if isinstance(error, FileNotFoundError):
            return "there is no such socket"
        if isinstance(error, ConnectionRefusedError):
            return "nobody listens there"
        if isinstance(error, PermissionError):
            return "this user may not; be root or the user of the daemon"
        if isinstance(error, TimeoutError):
            return f"it did not answer within {self._answer_seconds:g} s"
        if isinstance(error, http.client.RemoteDisconnected | ConnectionError):
            return "it closed the connection"
        if isinstance(error, http.client.IncompleteRead):
            return "its answer was cut off"
        if isinstance(error, http.client.HTTPException):
            return "what answers there is not kvd"
        return error.strerror or str(error)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def __init__(self, path: Path, answer_seconds: float) -> None:
        super().__init__("kvd", timeout=answer_seconds)
        self._path = path

    def connect(self) -> None:
        """See `http.client.HTTPConnection`."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            made.settimeout(CONNECT_SECONDS)
            made.connect(os.fspath(self._path))
            made.settimeout(self.timeout)
        except OSError:
            made.close()
            raise
        self.sock = made
