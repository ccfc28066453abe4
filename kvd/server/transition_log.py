"""Transitions of the machine as log events: one line for each, with the ids that it names.

Every transition is a debug event. What an operator must hear of is told at info or warning too:
doubt about a hold, fences, quarantine, poison, deaths and refusals. With debug off a step costs a
look at the types of its event and effects, and nothing more unless one of those is among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvd.core import effects as ef
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.copies import GATE_FREE, GATE_QUARANTINED
from kvd.core.errors import InvariantError
from kvd.core.ids import MemberRef, ReadId, SlotRef
from kvd.server.logs import LogLevel, Logs
from kvd.server.story_text import details, event_name, short

_PLAIN_FIELDS: Final = (
    "request",
    "transfer",
    "layer",
    "block",
    "region",
    "executor",
    "peer",
    "address",
    "saver",
    "why",
)


class TransitionLog:
    """Tells the steps of the machine to `Logs`."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    @property
    def enabled(self) -> bool:
        """Whether `step` can write anything at the present level."""
        return self._logs.wants("warning")

    def step(self, event: ev.Event, effects: Sequence[ef.Effect]) -> None:
        """One event and what followed from it."""
        log_transitions(self._logs, event, effects)

    def invariant(self, error: InvariantError) -> None:
        """kvd contradicts itself; it is about to stop."""
        self._logs.error("invariant_failed", problems=error.problems, story=error.story)


def log_transitions(logs: Logs, event: ev.Event, effects: Sequence[ef.Effect]) -> None:
    """Write one line for each transition of a step that the level lets through."""
    if logs.wants("debug"):
        _log_all(logs, event, effects)
        return
    if type(event) in _NOTABLE:
        _tell_notable(logs, event)
    for effect in effects:
        if type(effect) in _NOTABLE:
            _tell_notable(logs, effect)


def _log_all(logs: Logs, event: ev.Event, effects: Sequence[ef.Effect]) -> None:
    if isinstance(event, ev.SlotsChanged):
        for item in event.items:
            logs.debug(event_name(item), **ids(item), details=details(item))
    elif not isinstance(event, ev.Tick):
        logs.debug(event_name(event), **ids(event), details=details(event))
    for effect in effects:
        if not isinstance(effect, ef.Reply | ef.Refuse):
            logs.debug(_effect_name(effect), **ids(effect), details=details(effect))
    for record in (event, *effects):
        if type(record) in _NOTABLE:
            _tell_notable(logs, record)


def _effect_name(effect: object) -> str:
    if isinstance(effect, ef.StoreGate):
        if effect.state == GATE_FREE:
            return "slot_released"
        return "slot_quarantined" if effect.state == GATE_QUARANTINED else "slot_held"
    return event_name(effect)


# What an operator must hear of --------------------------------------------------------------------

_Told = Iterator[tuple[LogLevel, str, str, object]]
"""(level, event, kind for the limit, record that names the ids)"""


def _tell_notable(logs: Logs, record: object) -> None:
    for level, name, kind, subject in _NOTABLE[type(record)](record):
        if logs.wants(level):
            text = details(subject)
            logs.limited(level, name, kind, **ids(subject), details=text)


def _of_refusal(refuse: ef.Refuse) -> _Told:
    yield "info", "request_refused", refuse.error.code, refuse


def _of_death(event: ev.MemberDied) -> _Told:
    yield "info", "member_died", "", event


def _of_silence(event: ev.MemberSilent) -> _Told:
    yield "warning", "member_silent", "", event


def _of_lost_executor(event: ev.ExecutorLost) -> _Told:
    yield "info", "executor_lost", "", event


def _of_poison(event: ev.BlocksPoisoned) -> _Told:
    yield "warning", "blocks_poisoned", "", event


def _of_fence_end(event: ev.FenceEnded) -> _Told:
    if event.stopped:
        yield "info", "fence_worked", "", event
    else:
        yield "info", "fence_impossible", "", event


def _of_copy_end(event: ev.CopyEnded) -> _Told:
    if not event.ok:
        yield "warning", "copy_failed", "", event


def _of_slots(event: ev.SlotsChanged) -> _Told:
    for item in event.items:
        if isinstance(item, se.SaveEnded) and not item.ok:
            yield "warning", "save_failed", "", item
        elif isinstance(item, se.LoadEnded) and item.bad:
            yield "warning", "checksum_mismatch", "", item
        elif isinstance(item, se.LoadEnded) and not item.ok:
            yield "warning", "load_failed", "", item
        elif isinstance(item, se.Computed) and not item.ok:
            yield "warning", "compute_failed", "", item


def _of_gate(effect: ef.StoreGate) -> _Told:
    if effect.state == GATE_QUARANTINED:
        yield "warning", "slot_quarantined", "", effect


def _of_question(effect: ef.AskMember) -> _Told:
    yield "info", "hold_suspect", "", effect


def _of_member_fence(effect: ef.FenceMember) -> _Told:
    yield "info", "fence_asked", "", effect


def _of_query(effect: ef.SendQuery) -> _Told:
    if effect.fence:
        yield "info", "fence_asked", "", effect
    else:
        yield "info", "hold_suspect", "", effect


def _of_revoke(effect: ef.SendRevoke) -> _Told:
    yield "info", "read_revoked", effect.why, effect


def _of_format(effect: ef.FormatPool) -> _Told:
    yield "info", "pool_formatted", "", effect


_NOTABLE: Final[dict[type, Callable[..., _Told]]] = {
    ef.Refuse: _of_refusal,
    ev.MemberDied: _of_death,
    ev.MemberSilent: _of_silence,
    ev.ExecutorLost: _of_lost_executor,
    ev.BlocksPoisoned: _of_poison,
    ev.FenceEnded: _of_fence_end,
    ev.CopyEnded: _of_copy_end,
    ev.SlotsChanged: _of_slots,
    ef.StoreGate: _of_gate,
    ef.AskMember: _of_question,
    ef.FenceMember: _of_member_fence,
    ef.SendQuery: _of_query,
    ef.SendRevoke: _of_revoke,
    ef.FormatPool: _of_format,
}


# Ids ----------------------------------------------------------------------------------------------


def ids(record: object) -> dict[str, object]:
    """The ids that an event or effect names: engine, member, slot, epoch, request, layer ..."""
    found: dict[str, object] = {}
    if isinstance(record, ef.Refuse):
        return {"code": record.error.code, "what": record.error.what}
    offer = getattr(record, "offer", None)
    if offer is not None:
        _name_slot(found, offer.source.ref)
        _name_read(found, offer.read)
    ref = getattr(record, "ref", None)
    for named in (ref, getattr(record, "slot", None), getattr(record, "member", None)):
        if isinstance(named, SlotRef):
            _name_slot(found, named)
        elif isinstance(named, MemberRef):
            _name_member(found, named)
    if isinstance(record, ef.StoreGate):
        found["slot"] = record.slot
        found["epoch"] = record.epoch
    for owner in (getattr(record, "read", None), getattr(record, "owner", None)):
        if isinstance(owner, ReadId):
            _name_read(found, owner)
    for name in _PLAIN_FIELDS:
        value = getattr(record, name, None)
        if value is not None and value != "" and name not in found:
            found[name] = value if isinstance(value, int) else short(value)
    return found


def _name_member(found: dict[str, object], ref: MemberRef) -> None:
    found["engine"] = ref.engine
    found["member"] = ref.member


def _name_slot(found: dict[str, object], ref: SlotRef) -> None:
    _name_member(found, ref.member)
    found["slot"] = ref.slot
    found["epoch"] = ref.epoch


def _name_read(found: dict[str, object], read: ReadId) -> None:
    found["transfer"] = read.transfer
    found["layer"] = read.layer
    found["start"] = read.start
    found["attempt"] = read.attempt
