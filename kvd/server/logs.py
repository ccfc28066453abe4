"""Log events: structured, JSON or console, and never in the way of the event loop.

Events are constant snake_case names with ids as fields. Whoever logs is given the `Logs` object;
nothing is configured globally. An event costs the loop a few microseconds: it is formatted by
structlog in the writer's thread, which also loads that library, since loading it takes longer than
the daemon may take to answer its first probe.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Final, Literal, TypeAlias

from kvd.server.log_writer import LogEvent, LogWriter, Render

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "json", "console"]

LEVELS: Final[dict[str, int]] = {"debug": 10, "info": 20, "warning": 30, "error": 40}

BURST: Final = 20
"""Lines of one kind written within a second; more are counted and told by the next."""


class Logs:
    """Where the daemon logs. One for each process."""

    def __init__(
        self,
        level: LogLevel,
        form: LogFormat,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start logging.

        Args:
            level: least severe event that is written.
            form: auto: console on a terminal, json elsewhere.
            stream: has a file descriptor; standard error when None.
            clock: monotonic, seconds; for the limit on repeated events.
        """
        out = sys.stderr if stream is None else stream
        as_json = form == "json" or (form == "auto" and not out.isatty())
        colors = out.isatty()
        self._clock = clock
        self._windows: dict[tuple[str, str], tuple[float, int, int]] = {}
        self._writer = LogWriter(
            out.fileno(), lambda: _make_render(as_json, colors), _dropped_event
        )
        self.set_level(level)

    @property
    def level(self) -> LogLevel:
        """Least severe event that is written."""
        return self._level

    @property
    def dropped(self) -> int:
        """Events that the output was too slow for."""
        return self._writer.dropped

    def set_level(self, level: LogLevel) -> None:
        """Change the level; takes effect at once."""
        self._level: LogLevel = level
        self._threshold = LEVELS[level]

    def wants(self, level: LogLevel) -> bool:
        """Whether an event of this level is written; ask before gathering its fields."""
        return LEVELS[level] >= self._threshold

    def debug(self, event: str, **fields: object) -> None:
        """Write a debug event."""
        self._log("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Write an info event."""
        self._log("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Write a warning."""
        self._log("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Write an error."""
        self._log("error", event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Write an error with the traceback of the exception being handled."""
        self._log("error", event, {**fields, "exc_info": sys.exc_info()})

    def limited(self, level: LogLevel, event: str, kind: str, **fields: object) -> None:
        """Write an event that clients can cause at will, at most BURST a second for each kind.

        Args: kind: parts events that must not silence each other (a code); a fixed text.
        """
        if not self.wants(level):
            return
        now = self._clock()
        start, written, suppressed = self._windows.get((event, kind), (now, 0, 0))
        if now - start >= 1.0:
            start, written = now, 0
        if written >= BURST:
            self._windows[event, kind] = (start, written, suppressed + 1)
            return
        self._windows[event, kind] = (start, written + 1, 0)
        if suppressed:
            fields["suppressed"] = suppressed
        self._log(level, event, fields)

    def close(self, seconds: float = 1.0) -> bool:
        """Write what is queued, within so many seconds; returns whether all of it was written."""
        return self._writer.close(seconds)

    def _log(self, level: LogLevel, event: str, fields: dict[str, object]) -> None:
        if LEVELS[level] >= self._threshold:
            self._writer.write(LogEvent(time.time(), level, event, fields))


def _dropped_event(count: int) -> LogEvent:
    return LogEvent(time.time(), "warning", "log_events_dropped", {"count": count})


def _make_render(as_json: bool, colors: bool) -> Render:
    """Load structlog and return what makes a line of an event; runs in the writer's thread."""
    import structlog

    processors: list[Processor] = [structlog.processors.add_log_level]
    if as_json:
        processors += [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_to_json),
        ]
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=structlog.dev.plain_traceback
        )
        processors.append(renderer)

    def render(event: LogEvent) -> str:
        when = datetime.datetime.fromtimestamp(event.at, datetime.UTC)
        made: Any = {
            "event": event.event,
            "timestamp": when.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            **event.fields,
        }
        return _run_processors(processors, event.level, made)

    return render


def _run_processors(processors: list[Processor], level: str, made: EventDict) -> str:
    logger: WrappedLogger = None
    value: Any = made
    for processor in processors:
        value = processor(logger, level, value)
    return str(value)


def _to_json(event: dict[str, Any], **_: object) -> str:
    return json.dumps(event, default=str, ensure_ascii=False)


class _Bridge(logging.Handler):
    """Passes what libraries log on to `Logs`."""

    def __init__(self, logs: Logs) -> None:
        super().__init__(logging.WARNING)
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        level: LogLevel = "error" if record.levelno >= logging.ERROR else "warning"
        fields: dict[str, object] = {"logger": record.name, "text": record.getMessage()}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        self._logs.limited(level, "library_message", record.name, **fields)


def capture_library_logs(logs: Logs) -> Callable[[], None]:
    """Let warnings and errors that libraries log (asyncio, aiohttp) come out here.

    Returns: a function that undoes it.
    """
    bridge = _Bridge(logs)
    root = logging.getLogger()
    root.addHandler(bridge)

    def undo() -> None:
        root.removeHandler(bridge)

    return undo
