"""What happened, to be told later: a bounded ring of transitions, filtered by key.

Recording must cost next to nothing, so an entry keeps the very objects of the transition and is
turned into text only when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Entry(NamedTuple):
    """One recorded transition.

    at:      time of the event, ns.
    keys:    what it was about: slot, step, request, block, transfer, member names.
    event:   what happened.
    outcome: what followed (effects, codes, states).
    """

    at: int
    keys: tuple[object, ...]
    event: object
    outcome: object


RawEntry = tuple[int, tuple[object, ...], object, object]
"""The fields of an `Entry`; `Entry(*raw)` names them."""


class Story:
    """The last `limit` transitions. The oldest is dropped for a new one, and counted."""

    def __init__(self, limit: int) -> None:
        """An empty story of at most `limit` entries."""
        # Plain tuples: an Entry is made when somebody asks, since most are never looked at.
        self._entries: deque[RawEntry] = deque(maxlen=limit)
        self.recorded = 0

    def record(self, at: int, keys: tuple[object, ...], event: object, outcome: object) -> None:
        """Remember one transition."""
        self.recorded += 1
        self._entries.append((at, keys, event, outcome))

    @property
    def dropped(self) -> int:
        """How many entries the limit has cost so far."""
        return self.recorded - len(self._entries)

    def about(self, key: str, limit: int = 1000) -> list[Entry]:
        """The latest entries that name `key`, oldest first.

        A key matches when it equals the text of one of the entry's keys, or is a part of it that
        ends at a boundary: a request's name finds `engine/request`, a transfer finds its reads,
        `slot3` finds every tenancy of slot 3.
        """
        found = [Entry(*entry) for entry in self._entries if _names(entry[1], key)]
        return found[-limit:]

    def newest_first(self, limit: int | None = None) -> list[RawEntry]:
        """A copy of the latest entries that costs next to nothing for each: for long searches."""
        latest = reversed(self._entries)
        if limit is None:
            return list(latest)
        return [entry for entry, _ in zip(latest, range(limit), strict=False)]

    def __iter__(self) -> Iterator[Entry]:
        return (Entry(*entry) for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)


_BOUNDARIES = "/#@+. "


def _names(keys: Iterable[object], wanted: str) -> bool:
    return any(_is_part(str(key), wanted) for key in keys)


def _is_part(text: str, wanted: str) -> bool:
    at = text.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        starts = at == 0 or text[at - 1] in _BOUNDARIES
        if starts and (end == len(text) or text[end] in _BOUNDARIES):
            return True
        at = text.find(wanted, at + 1)
    return False
