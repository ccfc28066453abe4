"""Events and effects as one line of text each."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum

from kvd.core.errors import KvdError
from kvd.core.ids import LoadId, MemberRef, ReadId, RequestKey, SaveId, SlotRef

_NAMES = (LoadId, MemberRef, ReadId, RequestKey, SaveId, SlotRef)


def show(value: object) -> str:
    """Short text of a value; names as people write them, bytes by their first four."""
    if isinstance(value, _NAMES):
        return str(value)
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, KvdError):
        return f"{value.code} {value.context}"
    if isinstance(value, bytes):
        return value[:4].hex() + (f"..{len(value)}" if len(value) > 4 else "")
    if is_dataclass(value) and not isinstance(value, type):
        words = [f"{field.name}={show(getattr(value, field.name))}" for field in fields(value)]
        return f"{type(value).__name__}({' '.join(words)})"
    if isinstance(value, tuple):
        return "(" + " ".join(show(item) for item in value) + ")"
    return str(value)
