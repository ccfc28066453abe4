"""Run one seed: a time of faults, a calm time, and a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.clock import MS
from tests.sim.drain import leftovers
from tests.sim.faults import Injector
from tests.sim.memory import Violation
from tests.sim.world import World

DRAIN_MAX = 8_000 * MS
"""Bound of the calm phase: some times the sum of the longest chain of deadlines.

Chain: a request's lease 1000 ms and sweep 1000 ms; a transfer's deadline 1200 ms; a step 1500 ms;
for a hold: save 250 or compute 400 or read 150 ms, 3 questions and a fence at 40 ms; a hung copy
700 ms; read attempts up to 3, each offered for up to 300 ms.
"""

GIVE_UP = 1_600 * MS
"""When requests that still run in the calm phase are aborted."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a seed. `rule` and `text` are '' when every rule was kept.

    marks: how often rare things happened, by name.
    """

    seed: int
    rule: str
    text: str
    events: int
    copies: int
    transfers: int
    rows: int
    virtual_ms: int
    marks: Counter[str]

    @property
    def ok(self) -> bool:
        """Whether every rule was kept."""
        return not self.rule


def run_seed(seed: int, tracing: Callable[[str], None] | None = None) -> Verdict:
    """Run the world of a seed to its end, or to the first broken rule."""
    world = World(seed, tracing)
    rule = text = ""
    try:
        _run(world)
    except Violation as violation:
        rule, text = violation.rule, str(violation)
        world.trace(f"VIOLATION {text}")
    except (AssertionError, LookupError, TypeError, ValueError, AttributeError) as crash:
        # A crash of the machine is a verdict like any other: the seed shall be told.
        last = crash.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        where = f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last is not None else "?"
        rule, text = "crash", f"{type(crash).__name__}: {crash} at {where}"
        world.trace(f"VIOLATION {text}")
    return Verdict(
        seed, rule, text, world.num_events, world.dma.started, world.num_transfers,
        world.oracle.checked_rows, world.clock.now // MS, world.marks,
    )  # fmt: skip


def _run(world: World) -> None:
    injector = Injector(world)
    world.clock.at(20 * MS, world.arrive)
    world.clock.run_until(world.options.run)
    injector.calm()
    world.trace("calm")
    end = world.clock.now + DRAIN_MAX
    give_up = world.clock.now + GIVE_UP
    while world.clock.now < end:
        world.clock.run_until(world.clock.now + 100 * MS)
        if world.clock.now >= give_up:
            for engine in world.engines.values():
                for request in list(engine.requests.values()):
                    engine.abort(request)
        if not leftovers(world):
            return
    left = leftovers(world)
    raise Violation("drain", f"{left[0]} (of {len(left)}: {'; '.join(left[:6])})")
