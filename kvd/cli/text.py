"""Sizes, times and counts as people read them. Rounded: the JSON form has the exact figures."""

from __future__ import annotations

import re
from typing import Final

_PLACE: Final = re.compile(r"\{(\w+)[^}]*\}")
_CONTROLS: Final = re.compile("[\x7f-\x9f]")
_SIZES: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size(num_bytes: int) -> str:
    """`1.5 GiB`."""
    for name, unit in _SIZES:
        if num_bytes >= unit:
            shown = f"{num_bytes / unit:.1f}".removesuffix(".0")
            return f"{shown} {name}"
    return f"{num_bytes} B"


def seconds(value: float) -> str:
    """`40 ms`, `3.2 s`, `5 min 10 s`, `2 h 5 min`, `3 d 4 h`."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    whole = int(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def maybe_seconds(value: float | None) -> str:
    """The same, `-` for none."""
    return "-" if value is None else seconds(value)


def percent(part: int, whole: int) -> str:
    """`12.5%`, `-` of nothing."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def yes(value: bool) -> str:
    """`yes` or `no`."""
    return "yes" if value else "no"


def named(template: str) -> str:
    """Show `{free}` of an error's template as <free>."""
    return _PLACE.sub(r"<\1>", template)


def printable(text: str) -> str:
    """The same text with `?` for what is neither printable nor the end of a line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def safe_json(text: str) -> str:
    """The same document with control characters escaped that JSON does not ask to be."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
