"""What a `FaultyDevice` can do to an operation, and to which operations it does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from engine_shim.device import DeviceCode

OpKind = Literal["copy", "host", "record", "wait"]


@dataclass(frozen=True, slots=True)
class Delay:
    """The operation starts no earlier than ns after its submission, and so do those behind it."""

    ns: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The operation fails with `code`; a copy moves the first `moved` (0 to 1) of its bytes."""

    code: DeviceCode = DeviceCode.INJECTED
    moved: float = 0.0


@dataclass(frozen=True, slots=True)
class Lose:
    """What came before happens, its news never arrives: no event completes, nobody is called."""


@dataclass(frozen=True, slots=True)
class Late:
    """The news arrives ns after it was true; the stream goes on meanwhile."""

    ns: int


@dataclass(frozen=True, slots=True)
class Twice:
    """The host function is called again, ns after the first call."""

    ns: int = 0


@dataclass(frozen=True, slots=True)
class Swap:
    """The copy changes places with the next operation of its stream, if that is a copy too."""


@dataclass(frozen=True, slots=True)
class Hang:
    """The stream stops before the operation, until `FaultyDevice.resume` or its end."""


Fault = Delay | Fail | Lose | Late | Twice | Swap | Hang

_KINDS: Final[dict[type[Fault], tuple[OpKind, ...]]] = {
    Lose: ("host", "record"),
    Late: ("host", "record"),
    Twice: ("host",),
    Swap: ("copy",),
}


@dataclass(frozen=True, slots=True)
class OpInfo:
    """An operation as it is submitted: the nth (from 0) of its kind in its stream."""

    stream: str
    kind: OpKind
    nth: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to which operations; the first rule that takes an operation has it alone.

    stream, kind: None for any.
    nth:          only the nth (from 0) of the operations that the other conditions match.
    when:         further condition.
    probability:  share of the matching operations that are taken, drawn from the device's seed.
    Raises: ValueError when the fault cannot happen to operations of that kind.
    """

    fault: Fault
    stream: str | None = None
    kind: OpKind | None = None
    nth: int | None = None
    when: Callable[[OpInfo], bool] | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot happen."""
        kinds = _KINDS.get(type(self.fault))
        if kinds is not None and self.kind not in kinds:
            raise ValueError(
                f"kind is {self.kind}; {type(self.fault).__name__} needs {' or '.join(kinds)}"
            )
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"probability is {self.probability}; give 0 to 1")

    def matches(self, op: OpInfo) -> bool:
        """Whether the operation meets all conditions but nth and probability."""
        return (
            self.stream in (None, op.stream)
            and self.kind in (None, op.kind)
            and (self.when is None or self.when(op))
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal.

    what: "submitted", the fault's name in lower case, "called" (with ": code" for a failure),
          "not swapped", or "resumed".
    """

    at_ns: int
    op: OpInfo
    what: str
