"""What the prefill pipeline needs of its client; `engine_shim.client.KvdClient` has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine_shim.client import KeptStep, Tenancy, Ticket
from kvd.wire.slot_items import BadSumItem, LoadItem, ReadItem, SaveItem
from kvd.wire.sum_layout import SumView
from kvd_kernels.host import Mapping


class Desk(Protocol):
    """A member's slots. What reports something never waits for kvd; its ticket does."""

    def open_step(
        self,
        loads: Sequence[LoadItem] = (),
        saves: Sequence[SaveItem] = (),
        deadline_s: float | None = None,
    ) -> KeptStep:
        """Ask kvd to keep what all layers of a step load and save; its answer is not waited for.

        Raises: KvdRefused; nothing is asked.
        """

    def close_step(self, kept: KeptStep) -> None:
        """No copy of the step begins any more; those that run are waited for. Idempotent."""

    def begin(
        self,
        slot: int,
        layer: int = -1,
        loads: Sequence[LoadItem] = (),
        deadline_s: float | None = None,
        *,
        boot_id: bytes | None = None,
        early: bool = False,
        kept: KeptStep | None = None,
    ) -> tuple[Tenancy, Ticket]:
        """Wait at the gate and begin a tenancy; with loads, kvd is asked to pin their blocks,
        unless an open step keeps them.

        Raises: SlotQuarantined, KvdRefused.
        """

    def answer_to_begin(self, tenancy: Tenancy) -> Ticket:
        """kvd's answer to the `begin` of the tenancy alone, whatever it says to its step."""

    def await_loads(
        self,
        tenancy: Tenancy,
        layer: int,
        loads: Sequence[LoadItem],
        ticket: Ticket,
        deadline_s: float | None = None,
    ) -> None:
        """Wait until kvd has pinned the blocks of the loads of a `begin`.

        Raises: KvdRefused; the tenancy is given back.
        """

    def await_free(self, slot: int, deadline_s: float | None = None) -> None:
        """Wait until the gate word lets the slot be acquired; it is not.

        Raises: SlotQuarantined, KvdRefused.
        """

    def await_untouched(self, slots: Sequence[int], deadline_s: float | None = None) -> None:
        """Wait until nobody touches these slots; they are not taken.

        Raises: SlotQuarantined, KvdRefused.
        """

    def check_loaded(self, tenancy: Tenancy) -> Ticket | None:
        """What its loads have copied may be used: kvd kept their blocks until now.

        Returns: where they were copied for the sake of a step, kvd's answer to the begin.
        Raises: KvdRefused.
        """

    def load_ended(self, tenancy: Tenancy, ok: bool, bad: Sequence[BadSumItem] = ()) -> Ticket:
        """Its loads have ended; `bad` blocks had the wrong checksum."""

    def written(
        self,
        tenancy: Tenancy,
        layer: int,
        saves: Sequence[SaveItem] = (),
        reads: Sequence[ReadItem] = (),
        deadline_s: float | None = None,
        *,
        kept: KeptStep | None = None,
    ) -> Ticket:
        """Its rows are final: all saves and reads are armed; kept: a step with all targets."""

    def answer_to_save(self, tenancy: Tenancy, saver: str) -> Ticket:
        """The answer after which a save may be copied."""

    def confirm(self, tenancy: Tenancy, deadline_s: float | None = None) -> Ticket:
        """Wait until kvd has answered `written`; say it again while others load the same spans.

        Raises: KvdRefused.
        """

    def computed(self, tenancy: Tenancy, ok: bool = True, *, rides: bool = False) -> Ticket:
        """Attention has ended."""

    def abandon(self, tenancy: Tenancy) -> None:
        """End what is left of loads and computing, as failed; harmless when nothing is."""

    def save_started(
        self, tenancy: Tenancy, saver: str, deadline_s: float | None = None
    ) -> Ticket | None:
        """Wait until kvd keeps both ends of this save for us; then its copy may start.

        Returns: where it may start for the sake of a step, kvd's answer to the announcement.
        """

    def save_ended(
        self,
        tenancy: Tenancy,
        saver: str,
        ok: bool,
        tokens: Sequence[int] = (),
        sums: bytes = b"",
        *,
        rides: bool = False,
        posted: Callable[[], None] = ...,
    ) -> Ticket:
        """A save has ended; `posted` is called before it is sent."""


class SlotClient(Protocol):
    """A client with slots and a pool."""

    @property
    def slots(self) -> Desk:
        """The member's slots."""

    @property
    def generation(self) -> int:
        """Rises when kvd lost its pool: blocks of an earlier generation are void."""

    @property
    def pool(self) -> Mapping | None:
        """The pool's data."""

    @property
    def is_attached(self) -> bool:
        """Whether kvd is there now."""

    @property
    def checksums(self) -> str:
        """Which spans kvd wants checksums of: off, sampled or always."""

    def span_sums(self) -> SumView | None:
        """What the checksums of the pool's spans must be, None when none are kept.

        Raises: KvdRefused.
        """


def pool_of(client: SlotClient, tenancy: Tenancy) -> Mapping | None:
    """The pool that a tenancy's blocks lie in, None when a later kvd has another."""
    pool = client.pool
    return pool if client.generation == tenancy.generation else None
