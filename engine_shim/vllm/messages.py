"""What the two sides of the connector tell each other with every step; vLLM carries it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_shim.steps import StepRequest


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request cannot go on: a code, one sentence, and the engine's blocks that are void."""

    code: str
    detail: str
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Scheduler to workers: what a step loads and saves.

    requests: of the pipeline; their names are those of attempts, not the engine's.
    boot_id:  life of kvd that the pool blocks are of.
    forget:   attempts whose rows in bound slots are void from now on.
    doomed:   attempts that have failed already, with the device blocks to be reported.
    others:   attempts of which nothing is moved, and their device blocks: a step that fails as a
              whole fails them as well.
    """

    requests: tuple[StepRequest, ...] = ()
    boot_id: bytes = b""
    forget: tuple[str, ...] = ()
    doomed: dict[str, Failure] = field(default_factory=dict)
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SparseShare:
    """A request's tokens [start, end) of a step (sparse decode offload).

    replaces: `blocks` are all that the request has, else those added to what it had.
    fresh:    of `blocks`, how many at the end were given out anew; the others are prefix hits.
    """

    request: str
    start: int
    end: int
    blocks: tuple[int, ...]
    replaces: bool
    fresh: int


@dataclass(frozen=True, slots=True)
class SparseOrder:
    """Scheduler to workers, with sparse decode offload: what a step computes.

    forget: requests that have ended, or were preempted.
    region: life of the decode region that the rows are in: it grows when kvd has lost the region,
            and with it all rows that were computed.
    """

    shares: tuple[SparseShare, ...] = ()
    forget: tuple[str, ...] = ()
    region: int = 0


@dataclass(slots=True)
class StepReport:
    """Workers to scheduler: what became of a step.

    failed:  attempts of which rows are wrong or missing, and why.
    unsaved: attempts of which rows are not in the pool, although the step went well.
    """

    failed: dict[str, Failure] = field(default_factory=dict)
    unsaved: set[str] = field(default_factory=set)

    def with_rank(self, other: StepReport) -> StepReport:
        """What two ranks say together: a row that is missing on one is missing."""
        failed = dict(self.failed)
        for attempt, failure in other.failed.items():
            mine = failed.get(attempt)
            if mine is not None:
                blocks = tuple(sorted({*mine.blocks, *failure.blocks}))
                failure = Failure(mine.code, mine.detail, blocks)
            failed[attempt] = failure
        return StepReport(failed, self.unsaved | other.unsaved)

    def __bool__(self) -> bool:
        """Whether there is anything to say; vLLM drops what is not."""
        return bool(self.failed or self.unsaved)
