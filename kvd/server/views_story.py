"""From the live node to stories and the configuration."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from kvd.core import slot_events as se
from kvd.core.errors import KvdError
from kvd.core.ids import MemberRef, ReadId, RequestKey, StepId
from kvd.core.story import Entry, Story
from kvd.core.use_events import WholeTenancy
from kvd.server import story_text
from kvd.server.models_tables import ConfigEntry, ConfigPage, StoryEntry, StoryPage
from kvd.server.node_view import NodeView
from kvd.server.sliced import Work

ENTRIES_MAX: Final = 500
"""Most entries of one story."""

_STEP: Final = 256
_ID_CHARS_MAX: Final = 100
_BLOCK: Final = "block"
_STEP_KIND: Final = "step "


def story_page(view: NodeView, wanted: str, limit: int) -> Work[StoryPage]:
    """The latest transitions about one slot, step, request, block, transfer or member.

    Raises: KvdError(not_found): no transition that is still kept names it.
    """
    story = view.state().story
    entries = story.newest_first()
    dropped = story.dropped
    yield
    found = _Found(wanted, limit)
    for raw in reversed(entries):
        entry = Entry(*raw)
        for keys in _pieces(_names_in(entry, wanted)):
            if found.look(entry, keys):
                yield
    found.settle()
    if not found.matched:
        raise KvdError("not_found", what=story_text.line(wanted[:_ID_CHARS_MAX]))
    now = view.now()
    told: list[StoryEntry] = []
    for entry in found.latest:
        told.append(_story_entry(entry, now))
        yield
    return StoryPage(
        id=wanted, entries=told, matched=found.matched, searched=len(entries), dropped=dropped
    )


class _Found:
    """Entries that name something, found by the story's own rule, a bounded number at a time."""

    def __init__(self, wanted: str, limit: int) -> None:
        self.latest: deque[Entry] = deque(maxlen=limit)
        self.matched = 0
        self._wanted = wanted
        self._piece = Story(_STEP)
        self._num_keys = 0

    def look(self, entry: Entry, keys: tuple[object, ...]) -> bool:
        """Take an entry with some of its keys; returns whether enough was looked at for a pause."""
        self._piece.record(entry.at, keys, entry, None)
        self._num_keys += len(keys)
        if self._num_keys < _STEP and len(self._piece) < _STEP:
            return False
        self.settle()
        return True

    def settle(self) -> None:
        """Decide about everything taken so far."""
        for match in self._piece.about(self._wanted, _STEP):
            entry = match.event
            assert isinstance(entry, Entry)
            if not self.latest or self.latest[-1] is not entry:
                self.latest.append(entry)
                self.matched += 1
        self._piece = Story(_STEP)
        self._num_keys = 0


def _pieces(keys: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    for start in range(0, len(keys), _STEP):
        yield keys[start : start + _STEP]


def _names_in(entry: Entry, wanted: str) -> tuple[object, ...]:
    """The keys of an entry, and what its event and effects name beyond them.

    A slot's transition is recorded under the slot alone; the reads, requests and blocks that it
    concerns are in its event.
    """
    event, outcome = entry.event, entry.outcome
    names: list[object] = list(entry.keys)
    if isinstance(event, se.Written):
        names += [spec.read for spec in event.reads]
        names += _step(wanted, event.ref.member, event.step)
        if _has_block(wanted, event.saves):
            names.append(wanted)
    elif isinstance(event, se.Acquired):
        names += [RequestKey(event.ref.member.engine, load.request) for load in event.loads]
        names += _step(wanted, event.ref.member, event.step)
        if _has_block(wanted, event.loads):
            names.append(wanted)
    elif isinstance(event, WholeTenancy):
        member = event.ref.member
        names += [RequestKey(member.engine, load.request) for load in event.loads]
        names += _step(wanted, member, event.load_step)
        names += _step(wanted, member, event.save_step)
        if _has_block(wanted, (*event.loads, *event.saves)):
            names.append(wanted)
    elif isinstance(event, se.StepOpened):
        requests = {name for save in event.saves for name in save.requests}
        requests.update(load.request for load in event.loads)
        names += [RequestKey(event.member.engine, name) for name in requests if name]
        names += _step(wanted, event.member, event.number)
        if _has_block(wanted, (*event.saves, *event.loads)):
            names.append(wanted)
    elif isinstance(event, se.StepClosed):
        names += _step(wanted, event.member, event.number)
    else:
        names.append(getattr(event, "read", None))
    if isinstance(outcome, tuple):
        for effect in outcome:
            owner = getattr(effect, "read", None) or getattr(effect, "owner", None)
            if isinstance(owner, ReadId):
                names.append(owner)
    return tuple(names)


def _step(wanted: str, member: MemberRef, number: int) -> tuple[StepId, ...]:
    """The name of a step where it is looked for: else its number would do for that of a request."""
    return (StepId(member, number),) if number and wanted.startswith(_STEP_KIND) else ()


def _has_block(wanted: str, copies: Sequence[se.SaveSpec | se.LoadSpec]) -> bool:
    if not copies or not wanted.startswith(_BLOCK):
        return False
    digits = wanted.removeprefix(_BLOCK)
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 9:
        return False
    return any(int(digits) in copy.blocks for copy in copies)


def _story_entry(entry: Entry, now: int) -> StoryEntry:
    return StoryEntry(
        age_seconds=max(0, now - entry.at) / 1e9,
        subject=story_text.subject(entry),
        event=story_text.event_name(entry.event),
        details=story_text.details(entry.event),
        outcome=story_text.outcome(entry.outcome),
    )


def config_page(view: NodeView) -> ConfigPage:
    """Every key with its value and where that came from."""
    return ConfigPage(
        items=[
            ConfigEntry(
                key=row.key,
                value=row.value,
                origin=row.origin,
                reloadable=row.reloadable,
                description=row.description,
            )
            for row in view.config_rows()
        ]
    )


def story_text_of(page: StoryPage) -> str:
    """A story for people: one line for each transition, oldest first."""
    lines = [
        f"{-entry.age_seconds:>12.3f} s  {entry.subject}  {entry.event}"
        + (f"  {entry.details}" if entry.details else "")
        + (f"  -> {entry.outcome}" if entry.outcome else "")
        for entry in page.entries
    ]
    if page.matched > len(page.entries):
        lines.insert(0, f"... {page.matched - len(page.entries)} earlier ones; raise the limit")
    return "\n".join(lines) + "\n"
