"""How names of counters divide into families: refusals by code, races by reason, and the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

REQUESTS: Final = "requests"
"""What was refused, for counters named just `refused_<code>`."""

_REFUSED: Final = "refused_"
_IGNORED: Final = "ignored_"


class Sorted(NamedTuple):
    """Counters by family; `refused` by (what was refused, code)."""

    refused: dict[tuple[str, str], int]
    ignored: dict[str, int]
    rest: dict[str, int]


def sort_counters(counters: Iterable[tuple[str, int]]) -> Sorted:
    """Divide counters; equal names add up."""
    found = Sorted({}, {}, {})
    for name, count in counters:
        what, is_refusal, code = name.partition(_REFUSED)
        if is_refusal and code and (not what or what.endswith("_")):
            key = (what.rstrip("_") or REQUESTS, code)
            found.refused[key] = found.refused.get(key, 0) + count
        elif name.startswith(_IGNORED):
            reason = name.removeprefix(_IGNORED)
            found.ignored[reason] = found.ignored.get(reason, 0) + count
        else:
            found.rest[name] = found.rest.get(name, 0) + count
    return found
