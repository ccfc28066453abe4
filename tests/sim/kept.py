"""Steps of a worker: kvd is asked to keep what all layers copy, then copies wait for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.core import slot_events as se
from kvd.core.ids import StepId
from tests.sim.memory import Violation

if TYPE_CHECKING:
    from tests.sim.tenancy import Step
    from tests.sim.worker import Worker

REFUSALS = (
    "block_not_reserved",
    "block_poisoned",
    "request_ended",
    "span_busy",
    "span_unwritten",
    "reserve_too_large",
)
"""Codes that a step may be refused with; layers are then asked for one by one."""


@dataclass(eq=False, slots=True)
class KeptStep:
    """What a worker asked one life of kvd to keep.

    copies: that name it, or rely on it, and were not reported yet.
    """

    worker: Worker
    boot: int
    id: StepId
    loads: tuple[se.LoadSpec, ...] = ()
    saves: tuple[se.SaveSpec, ...] = ()
    answered: bool = False
    ok: bool = False
    closes: bool = False
    copies: int = 0

    @property
    def counts(self) -> bool:
        """Whether copies may begin by it now."""
        return self.ok and not self.closes and self.boot == self.worker.boot

    @property
    def is_awaited(self) -> bool:
        """Whether its answer may still come."""
        return not self.answered and self.boot == self.worker.boot

    def keeps(self, specs: tuple[se.LoadSpec, ...] | tuple[se.SaveSpec, ...]) -> bool:
        """Whether all blocks of some loads, or of some saves, are among its own."""
        if not specs or not self.counts:
            return False
        own = self.saves if isinstance(specs[0], se.SaveSpec) else self.loads
        kept = {block for spec in own for block in spec.blocks}
        return all(kept.issuperset(spec.blocks) for spec in specs)

    def number_for(
        self, specs: tuple[se.LoadSpec, ...] | tuple[se.SaveSpec, ...], *, refused: bool
    ) -> int:
        """Its number, if these are all its own and may be asked for by it though it is not kept.

        refused: only once kvd has refused it; otherwise also while there is no answer.
        """
        own = self.saves if specs and isinstance(specs[0], se.SaveSpec) else self.loads
        is_open = not self.closes and self.boot == self.worker.boot and not self.ok
        if not specs or specs != own or not is_open or (refused and not self.answered):
            return 0
        self.worker.world.marks["asked for by a step that is not kept"] += 1
        return self.id.number

    def open(self) -> None:
        """Ask for it."""
        event = se.StepOpened(self.id.member, self.id.number, self.loads, self.saves)
        self.worker.say(event, self._opened)

    def _opened(self, code: str) -> None:
        if code and code not in REFUSALS:
            raise Violation("never", f"{self.id} refused with {code}")
        self.answered, self.ok = True, not code
        self.worker.world.marks[f"step refused: {code}" if code else "step kept"] += 1
        self.worker.advance()

    def copy_ended(self) -> None:
        """A copy that relies on it was reported."""
        self.copies -= 1
        self._say_closed()

    def close(self) -> None:
        """No copy begins any more."""
        if not self.closes:
            self.closes = True
            self._say_closed()

    def _say_closed(self) -> None:
        if self.closes and not self.copies:
            self.worker.say(se.StepClosed(self.id.member, self.id.number))


def open_steps(
    worker: Worker, step: Step, loads: tuple[se.LoadSpec, ...], saves: tuple[se.SaveSpec, ...]
) -> tuple[KeptStep | None, KeptStep | None]:
    """Ask for what a step loads, then for what it saves, or for both at once.

    Like the pipeline mostly not where rows are offered to readers: these are not redirected while
    the blocks are kept.
    """
    rng = worker.world.step_rng
    if any(part.request.transfer for part in step.parts) and rng.random() < 0.7:
        return None, None
    if len(saves) > 1:
        saves = (joined(saves),)
    if loads and saves and rng.random() < 0.2:
        both = _make(worker, loads, saves)
        return both, both
    kept_loads = _make(worker, loads, ()) if loads else None
    kept_saves = _make(worker, (), saves) if saves else None
    return kept_loads, kept_saves


def _make(
    worker: Worker, loads: tuple[se.LoadSpec, ...], saves: tuple[se.SaveSpec, ...]
) -> KeptStep:
    worker.last_step += 1
    kept = KeptStep(worker, worker.boot, StepId(worker.ref, worker.last_step), loads, saves)
    kept.open()
    return kept


def joined(specs: tuple[se.SaveSpec, ...]) -> se.SaveSpec:
    """Several saves as one."""
    blocks = tuple(block for spec in specs for block in spec.blocks)
    tokens = tuple(count for spec in specs for count in spec.tokens)
    requests = tuple(name for spec in specs for name in spec.requests)
    return se.SaveSpec("all", blocks, tokens, requests)
