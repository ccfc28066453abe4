"""Laws that hold for one transition whatever came before: a second oracle, without any books."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.core import slot_events as ev
from kvd.core.holds import Doubt, Hold, HoldKind, Phase
from kvd.core.slot import Saved
from tests.exhaustive.space import Edge, is_refusal

_STOPS_COMPUTE = ev.Computed | ev.Answered | ev.Fenced | ev.ExecutorDied
_STOPS_SAVE = ev.SaveEnded | ev.Answered | ev.Fenced | ev.ExecutorDied
_STOPS_READ = ev.ReadEnded | ev.Answered | ev.Fenced | ev.ExecutorDied


def broken_laws(edge: Edge) -> Iterator[str]:
    """What is wrong with one transition, whoever the parties are."""
    before, event, after, effects = edge.before, edge.event, edge.after, edge.effects
    releases = [effect for effect in effects if isinstance(effect, ev.Release)]
    if after.ref.epoch - before.ref.epoch != len(releases) or len(releases) > 1:
        yield "the epoch rises by one at a release and at no other time (R4)"
    if releases and (effects[-1] != ev.Release(before.ref) or after.holds):
        yield "a release is the last effect and leaves no hold (R1)"
    if any(isinstance(effect, ev.Ignore) for effect in effects) and (
        after != before or not is_refusal(effects)
    ):
        yield "what is ignored changes nothing and has no other effect (R7)"
    if event.ref != before.ref and not is_refusal(effects):
        yield "an event of another tenancy is ignored (R4)"
    if isinstance(event, ev.Written) and not is_refusal(effects):
        yield from _arming(edge, event)
    lifted = [hold for hold in before.holds if after.find(hold.kind, hold.owner) is None]
    for hold in lifted:
        yield from _lifting(edge, hold)
    redirected = any(isinstance(effect, ev.RedirectRead) for effect in effects)
    if redirected and any(hold.kind is HoldKind.SAVE for hold in after.holds):
        yield "nothing is redirected to the pool while a save of it is open (R5a)"
    saved_now = isinstance(event, ev.SaveEnded) or (
        isinstance(event, ev.Answered) and event.kind is HoldKind.SAVE
    )
    if redirected and before.saved is not Saved.DONE and not saved_now:
        yield "nothing is redirected to the pool before the saves are done (R5a)"


def _arming(edge: Edge, event: ev.Written) -> Iterator[str]:
    for save in event.saves:
        if edge.after.find(HoldKind.SAVE, save.saver) is None:
            yield f"the save of {save.saver} is not armed at once (R2)"
    for spec in event.reads:
        if edge.after.find(HoldKind.READ, spec.read) is None:
            yield f"the read {spec.read} is not armed at once (R2)"
    if all(hold.kind is not HoldKind.COMPUTE for hold in edge.after.holds):
        yield "holds are armed while COMPUTE is there (R2)"


def _lifting(edge: Edge, hold: Hold) -> Iterator[str]:
    event = edge.event
    if hold.phase is Phase.OFFERED:
        return
    stops = {
        HoldKind.COMPUTE: isinstance(event, _STOPS_COMPUTE),
        HoldKind.SAVE: isinstance(event, _STOPS_SAVE),
        HoldKind.READ: isinstance(event, _STOPS_READ),
    }
    if not stops[hold.kind]:
        yield f"{type(event).__name__} lifts the running {hold.kind.value} of {hold.owner} (R5)"
    if isinstance(event, ev.Answered | ev.Fenced) and not hold.is_named(event.kind, event.owner):
        yield f"a word about {event.owner} lifts {hold.owner} (R3)"
    if isinstance(event, ev.ReadEnded) and (event.read, event.executor) != (
        hold.owner,
        hold.executor,
    ):
        yield f"the end of {event.read} lifts {hold.owner} (R3)"
    if isinstance(event, ev.SaveEnded) and event.saver != hold.owner:
        yield f"the end of {event.saver} lifts {hold.owner} (R3)"
    if isinstance(event, ev.ExecutorDied) and event.executor != hold.executor:
        yield f"the death of {event.executor} lifts what {hold.executor} executes (R5)"
    if isinstance(event, ev.Answered) and hold.doubt is Doubt.NONE:
        yield "an answer that nobody asked for lifts a hold (R5)"
    if isinstance(event, ev.Fenced) and hold.doubt < Doubt.FENCING:
        yield "a fence that nobody asked for lifts a hold (R5)"
