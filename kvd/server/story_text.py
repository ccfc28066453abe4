"""Recorded transitions as text: one readable line each, whatever they hold.

The story keeps the very objects of a transition. Names come from their types (`ReadClaimed` reads
`read_claimed`), values from their fields; long values are cut, and nothing that a client sent can
break a line.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from enum import Enum, IntEnum
from itertools import islice
from typing import Final

from kvd.core.errors import KvdError
from kvd.core.holds import Doubt, Hold
from kvd.core.slot_events import LoadSpec, ReadSpec, SaveSpec, StepClosed, StepOpened
from kvd.core.story import Entry
from kvd.core.use_events import Used, parts

_ITEMS_MAX: Final = 4
_TEXT_MAX: Final = 400
_BYTES_MAX: Final = 8
_WORD: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

# What the subject says already, and handles that mean nothing outside the process.
_STEPS: Final = frozenset({"step", "load_step", "save_step"})
_NOT_TOLD: Final = frozenset({"ref", "reply"})


def event_name(event: object) -> str:
    """The name of an event or effect: its type in snake_case, or the text that was recorded."""
    if isinstance(event, str):
        return line(event.replace(" ", "_"))
    return _WORD.sub("_", type(event).__name__).lower()


def subject(entry: Entry) -> str:
    """What a transition was about: its keys."""
    shown = " ".join(str(key) for key in entry.keys[:_ITEMS_MAX])
    more = len(entry.keys) - _ITEMS_MAX
    return line(f"{shown} +{more}" if more > 0 else shown)


def details(event: object) -> str:
    """The values of an event, `name=value` each."""
    return line(" ".join(_fields(event)))


def outcome(value: object) -> str:
    """What followed from an event: effects or states, parted by semicolons."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return line("; ".join(_long(item) for item in value))
    return line(_long(value))


def line(text: str) -> str:
    """Make one line of bounded length of any text."""
    clipped = text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."
    if clipped.isprintable():
        return clipped
    return "".join(char if char.isprintable() else "?" for char in clipped)


def _long(value: object) -> str:
    """An effect with its values, anything else in short."""
    if _is_plain_record(value):
        return " ".join((event_name(value), *_fields(value)))
    return short(value)


def _fields(value: object) -> Iterator[str]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if field.name in _NOT_TOLD or content is None or content == () or content == "":
            continue
        if field.name in _STEPS and not content:
            continue
        if field.name == "did" and isinstance(value, Used):
            content = "+".join(event_name(part) for part in parts(value)) or content
        if field.name == "member" and isinstance(value, StepOpened | StepClosed):
            continue
        yield f"{field.name}={short(content)}"


def short(value: object) -> str:
    """Any value in a few words."""
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        more = "..." if len(value) > _BYTES_MAX else ""
        return value[:_BYTES_MAX].hex() + more
    if isinstance(value, KvdError):
        return value.code
    if isinstance(value, SaveSpec):
        return value.saver
    if isinstance(value, ReadSpec):
        return str(value.read)
    if isinstance(value, LoadSpec):
        return value.request
    if isinstance(value, Hold):
        return _hold(value)
    if isinstance(value, tuple | list | dict) and not hasattr(value, "_fields"):
        return _some(value)
    if _is_plain_record(value):
        return f"{event_name(value)}({' '.join(_fields(value))})"
    return str(value)


def _hold(hold: Hold) -> str:
    doubt = f" {hold.doubt.name.lower()}" if hold.doubt is not Doubt.NONE else ""
    return f"{hold.kind.value} {hold.owner} {hold.phase.value}{doubt}"


def _some(values: Iterable[object]) -> str:
    items = list(islice(values, _ITEMS_MAX + 1))
    text = ",".join(short(item) for item in items[:_ITEMS_MAX])
    return f"[{text},...]" if len(items) > _ITEMS_MAX else f"[{text}]"


def _is_plain_record(value: object) -> bool:
    """Whether a value is an event or effect: a dataclass without a text of its own."""
    special = (SaveSpec, ReadSpec, LoadSpec, Hold, KvdError, type)
    return dataclasses.is_dataclass(value) and not isinstance(value, special)
