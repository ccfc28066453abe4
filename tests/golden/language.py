"""The language of the release scripts: one line is one event, said about one slot.

    rules readers=4 attempts=2 questions=2
    announced [computing] [saves=s,..] [reads=a:KVD,..]     a slot as a member announces it
    acquired | poisoned | abandoned | written [saves=s,..] [reads=a,..]
    computed ok|failed | load_ended ok|failed | save_ended NAME ok|failed
    claimed READ by KVD [claim=N] | declined READ | read_ended READ by KVD ok|failed
    answered KIND NAME TRUTH | fenced KIND NAME | unfenceable KIND NAME | died PROCESS
    tick DURATION

A READ is `a` (attempt 0) or `a.1`; KIND is COMPUTE, SAVE or READ; the owner of COMPUTE is
`engine`; the process of the member is `member`, and `nobody` is none. At the end of a line, `@N`
names another epoch and `#N` another incarnation than the slot's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from kvd.core import slot_events as ev
from kvd.core.holds import Doubt, Hold, HoldKind, Phase, Truth
from kvd.core.ids import MemberRef, Owner, ReadId, SlotRef
from kvd.core.slot import Saved, Slot
from tests.exhaustive.classes import state_class

MEMBER: Final = MemberRef("p", "w0", 1)
LAYER: Final = 0


class ScriptError(Exception):
    """A line of a script cannot be understood."""


def split_ref(words: list[str], ref: SlotRef) -> tuple[list[str], SlotRef]:
    """Take `@N` and `#N` off the end of a line; returns the other words and the tenancy meant."""
    rest = list(words)
    while rest and rest[-1][0] in "@#" and rest[-1][1:].isdecimal():
        number = int(rest[-1][1:])
        if rest.pop()[0] == "@":
            ref = ref._replace(epoch=number)
        else:
            ref = ref._replace(member=ref.member._replace(incarnation=number))
    return rest, ref


def parse_event(words: list[str], ref: SlotRef) -> ev.SlotEvent:
    """The event that a line says, about the tenancy `ref`.

    Raises: ScriptError.
    """
    make = _EVENTS.get(words[0])
    if make is None:
        raise ScriptError(f"unknown word {words[0]!r}; use one of {', '.join(_EVENTS)}, tick")
    try:
        return make(ref, words[1:])
    except (IndexError, KeyError, ValueError) as error:
        raise ScriptError(f"cannot read {' '.join(words)!r}: {error!r}") from error


def parse_read(text: str) -> ReadId:
    """`a` or `a.1` as the name of a read."""
    transfer, _, attempt = text.partition(".")
    return ReadId(transfer, LAYER, 0, int(attempt or "0"))


def settings(words: list[str]) -> dict[str, str]:
    """The `key=value` words of a line; a word alone has the value ''."""
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def names(text: str) -> list[str]:
    """The names in a comma separated list."""
    return [name for name in text.split(",") if name]


def process(text: str) -> str:
    """The name of a process: `member` stands for the slot's own, `nobody` for none."""
    return {"member": str(MEMBER), "nobody": ""}.get(text, text)


def _ok(text: str) -> bool:
    return {"ok": True, "failed": False}[text]


def _party(words: list[str]) -> tuple[HoldKind, Owner]:
    kind = HoldKind[words[0]]
    return kind, parse_read(words[1]) if kind is HoldKind.READ else words[1]


def _written(ref: SlotRef, words: list[str]) -> ev.Written:
    given = settings(words)
    saves = tuple(ev.SaveSpec(name, (0,), (4,)) for name in names(given.pop("saves", "")))
    reads = tuple(ev.ReadSpec(parse_read(n), "peer", 4) for n in names(given.pop("reads", "")))
    if given:
        raise ValueError(f"unknown {sorted(given)}")
    return ev.Written(ref, LAYER, saves, reads)


def _claimed(ref: SlotRef, words: list[str]) -> ev.ReadClaimed:
    claim = int(settings(words[3:]).get("claim", "0"))
    return ev.ReadClaimed(ref, parse_read(words[0]), process(words[2]), claim)


_EVENTS: Final[Mapping[str, Callable[[SlotRef, list[str]], ev.SlotEvent]]] = MappingProxyType(
    {
        "acquired": lambda ref, words: ev.Acquired(ref, LAYER),
        "load_ended": lambda ref, words: ev.LoadEnded(ref, _ok(words[0])),
        "written": _written,
        "computed": lambda ref, words: ev.Computed(ref, _ok(words[0])),
        "save_ended": lambda ref, words: ev.SaveEnded(ref, words[0], _ok(words[1])),
        "claimed": _claimed,
        "declined": lambda ref, words: ev.ReadDeclined(ref, parse_read(words[0])),
        "read_ended": lambda ref, words: ev.ReadEnded(
            ref, parse_read(words[0]), process(words[2]), _ok(words[3])
        ),
        "answered": lambda ref, words: ev.Answered(ref, *_party(words), Truth(words[2])),
        "fenced": lambda ref, words: ev.Fenced(ref, *_party(words)),
        "unfenceable": lambda ref, words: ev.Unfenceable(ref, *_party(words)),
        "died": lambda ref, words: ev.ExecutorDied(ref, process(words[0])),
        "poisoned": lambda ref, words: ev.Poisoned(ref),
        "abandoned": lambda ref, words: ev.Abandoned(ref),
    }
)


def show_effect(effect: ev.SlotEffect) -> str:
    """An effect in a few words."""
    match effect:
        case ev.Release(ref):
            return f"release @{ref.epoch}"
        case ev.OfferRead(_, read):
            return f"offer {_name(read)}"
        case ev.GrantRead(_, read, executor, claim):
            return f"grant {_name(read)} to {_who(executor)} claim={claim}"
        case ev.RedirectRead(_, read):
            return f"redirect {_name(read)}"
        case ev.FinishRead(_, read):
            return f"finish {_name(read)}"
        case ev.FailRead(_, read, why):
            return f"fail {_name(read)}: {why}"
        case ev.SettleSave(_, saver, ok):
            return f"settle {saver} {'ok' if ok else 'failed'}"
        case ev.PoisonTenancy():
            return "poison"
        case ev.AskTruth(_, kind, owner, executor):
            return f"ask {_who(executor)} about {kind.name} {_name(owner)}"
        case ev.AskFence(_, kind, owner, executor):
            return f"fence {kind.name} {_name(owner)} of {_who(executor)}"
        case ev.ReportQuarantine(_, kind, owner):
            return f"quarantine {kind.name} {_name(owner)}"
        case ev.Ignore(_, why):
            return f"ignored {why}"


def show_slot(slot: Slot) -> str:
    """A slot in one line: epoch, class of state, marks, holds."""
    marks = [f"@{slot.ref.epoch}", state_class(slot).value]
    marks += ["poisoned"] if slot.poisoned else []
    marks += [f"saves={slot.saved.value}"] if slot.saved is not Saved.NONE else []
    holds = ", ".join(_show_hold(hold) for hold in slot.holds)
    return " ".join(marks) + (f": {holds}" if holds else "")


def _show_hold(hold: Hold) -> str:
    words = [hold.kind.name]
    words += [_name(hold.owner)] if hold.kind is not HoldKind.COMPUTE else []
    words += [f"by {_who(hold.executor)}"] if hold.executor != str(MEMBER) else []
    if hold.phase is Phase.OFFERED:
        words = [hold.kind.name, _name(hold.owner), "offered"]
    words += [hold.doubt.name.lower()] if hold.doubt is not Doubt.NONE else []
    return " ".join(words)


def _name(owner: Owner) -> str:
    return f"{owner.transfer}.{owner.attempt}" if isinstance(owner, ReadId) else owner


def _who(executor: str) -> str:
    return "member" if executor == str(MEMBER) else executor
