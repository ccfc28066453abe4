"""A client whose kvd is in this process, as both sides of the connector use it."""

from __future__ import annotations

from engine_shim.client import KvdRefused
from engine_shim.client.session import LinkState
from engine_shim.vllm.engine_plan import EnginePlan
from kvd.core import events as ev
from kvd.core import results as res
from tests.unit.engine_shim.fake_kvd import FakeKvd

ABSENT = ("unreachable", {"path": "its socket", "detail": "kvd is away"})


class FakeClient(FakeKvd):
    """Scheduler and worker member in one; `is_away` cuts the scheduler's way to kvd."""

    def __init__(self, plan: EnginePlan, num_blocks: int, checksums: str = "off") -> None:
        super().__init__(plan.layout, len(plan.ring.slots), num_blocks, checksums)
        self.boot_id = b"boot"
        self.is_away = False
        self.retries = 0

    @property
    def state(self) -> LinkState:
        """How the scheduler stands with kvd."""
        return LinkState.LOST if self.is_away else LinkState.ATTACHED

    def retry(self) -> None:
        """See `KvdClient`."""
        self.retries += 1

    def wait_attached(self, deadline_s: float | None = None) -> int:
        """See `KvdClient`; what is away stays away."""
        self._reach()
        return self.generation

    def goodbye(self, deadline_s: float | None = None) -> None:
        """See `KvdClient`."""

    def open(self) -> FakeClient:
        """See `KvdClient`."""
        return self

    def handle(self, event: ev.Event) -> res.Result | None:
        """Apply one event, if kvd can be reached for it."""
        if isinstance(event, ev.LookedUp | ev.Reserved | ev.Committed | ev.RequestEnded):
            self._reach()
        return super().handle(event)

    def _reach(self) -> None:
        if self.is_away:
            code, context = ABSENT
            raise KvdRefused(code, **context)

    @property
    def used(self) -> int:
        """Blocks that are in use or ready."""
        pool = self.machine.state.pool
        assert pool is not None
        return pool.blocks.total - len(pool.blocks.free)

    @property
    def pinned(self) -> dict[int, object]:
        """Blocks that somebody keeps."""
        pool = self.machine.state.pool
        assert pool is not None
        return {block: pins for block, pins in pool.blocks.pins.items() if pins}

    @property
    def known(self) -> set[str]:
        """Requests that kvd knows of."""
        return set(self.machine.state.engines["engine"].requests)
