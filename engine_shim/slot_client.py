"""What the prefill pipeline needs of its client; `engine_shim.client.KvdClient` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine_shim.client import Tenancy, Ticket
from kvd.wire.slot_items import LoadItem, ReadItem, SaveItem
from kvd_kernels.host import Mapping


class SlotClient(Protocol):
    """A member's view of its slots. Methods that post do not wait for kvd; their tickets do."""

    @property
    def generation(self) -> int:
        """Rises when kvd lost its pool: blocks of an earlier generation are void."""

    @property
    def pool(self) -> Mapping:
        """The pool's data."""

    def acquire(
        self, slot: int, layer: int, loads: Sequence[LoadItem], deadline_s: float
    ) -> Tenancy:
        """Wait at the gate and begin a tenancy; with loads, their blocks are pinned then.

        Raises: SlotQuarantined, KvdRefused.
        """

    def load_ended(self, tenancy: Tenancy, ok: bool) -> Ticket:
        """Its loads have ended."""

    def written(
        self,
        tenancy: Tenancy,
        layer: int,
        saves: Sequence[SaveItem],
        reads: Sequence[ReadItem],
    ) -> Ticket:
        """Its rows are final: all saves and reads are armed."""

    def computed(self, tenancy: Tenancy, ok: bool) -> Ticket:
        """Attention has ended."""

    def save_ended(self, tenancy: Tenancy, saver: str, ok: bool) -> Ticket:
        """A save has ended."""
