"""What one prefill step is made of, and what became of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine_shim.client import KeptStep, KvdRefused, Tenancy, Ticket
from engine_shim.conditions import Condition
from engine_shim.device import DeviceError
from engine_shim.flags import Flag
from kvd.plan.sums import BadSpan
from kvd.wire.slot_items import LoadItem, SaveItem

CHECKSUM_MISMATCH: Final = "checksum_mismatch"
"""Code of a step that loaded damaged blocks; kvd has dropped those, so a retry computes them."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request's rows go besides the pool: a transfer, and the kvd that reads for it."""

    transfer: str
    peer: str


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request's share of a step.

    device_blocks: engine block ids of tokens [0, end), in order.
    pool_blocks:   pool blocks of the same tokens, in order; of an optional request maybe fewer.
    num_computed:  tokens whose KV exists before the step.
    end:           tokens whose KV exists after it.
    targets:       transfers that get its rows.
    offered:       rows that the targets were offered in earlier steps.
    optional:      nobody but later requests would ever read this step's rows in the pool, so they
                   may be left unsaved: no step of this request follows, and there is no target,
                   which may have to read them there once the slot has moved on.
    resident:      tokens [0, resident) are in the slots that belong to one layer for good, by the
                   engine's own account: nothing of them is loaded there.
    save_from:     first token whose rows are saved, -1 for `num_computed`. Rows of earlier steps
                   are in their slots only where every layer has one of its own.
    save_to:       where the saved tokens end, -1 for `end`.
    Raises: ValueError when it is optional and has targets.
    """

    request: str
    device_blocks: tuple[int, ...]
    pool_blocks: tuple[int, ...]
    num_computed: int
    end: int
    targets: tuple[Target, ...] = ()
    offered: int = 0
    optional: bool = False
    resident: int = 0
    save_from: int = -1
    save_to: int = -1

    def __post_init__(self) -> None:
        if self.optional and self.targets:
            raise ValueError(f"request {self.request} is optional, but has targets")

    @property
    def saved_start(self) -> int:
        """Where its saved tokens begin."""
        return self.num_computed if self.save_from < 0 else self.save_from

    def saved_end(self, block_tokens: int) -> int:
        """Where its saved tokens end, at most where an optional request's pool blocks do."""
        end = self.end if self.save_to < 0 else self.save_to
        if self.optional:
            end = min(end, len(self.pool_blocks) * block_tokens)
        return max(self.saved_start, end)


class StepFailed(Exception):
    """A step cannot go on; its requests end with this code, or are tried again.

    code:   of kvd's catalogue, the client or the device.
    detail: one sentence.
    slot:   the quarantined slot whose layers must be rebound, -1 for another failure.
    """

    def __init__(self, code: str, detail: str, slot: int = -1) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.slot = slot

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


def as_step_failure(error: KvdRefused | DeviceError) -> StepFailed:
    """The failure of a step by a refusal of kvd, or of the device."""
    if isinstance(error, DeviceError):
        return StepFailed(str(error.code), error.detail)
    return StepFailed(error.code, f"{error.what} {error.remedy}".strip())


def checksum_failure(layer: int, bad: Sequence[BadSpan]) -> StepFailed:
    """The failure of a step that loaded other bytes than had been saved."""
    block, expected, got = bad[0]
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return StepFailed(
        CHECKSUM_MISMATCH,
        f"pool block {block}{more}, layer {layer}: checksum {got:08x} instead of {expected:08x}",
    )


Missing = list[tuple[StepRequest, int]]
"""Requests of which a slot lacks rows, and how many tokens it has."""


@dataclass(slots=True)
class LayerState:
    """One layer of a running step.

    acquired: set when `tenancy` is there, or the step has failed.
    loaded:   set when nothing is loaded into the slot any more and kvd has been told.
    armed:    kvd's answer to the announcement of its saves, None when there are none.
    is_let_go: compute has given the slot up while it was loaded: the loader says so in the end.
    saved:    set when the layer's save has ended and kvd knew of it, or none was started.

    A step that fails sets `acquired` and `saved` of all layers: who waits must look at `failure`.
    """

    acquired: Flag
    loaded: Flag
    saved: Flag
    tenancy: Tenancy | None = None
    armed: Ticket | None = None
    is_written: bool = False
    is_computed: bool = False
    is_let_go: bool = False


class Step:
    """A running step; shared by the compute thread and the copy threads."""

    def __init__(
        self,
        requests: tuple[StepRequest, ...],
        num_layers: int,
        end: int,
        boot_id: bytes | None = None,
    ) -> None:
        """end: deadline, ns of the monotonic clock; boot_id: life of kvd of the pool blocks.

        `is_begun`: its layers may run.
        `is_shed`: from here on rows of optional requests are not saved.
        `is_free`: nothing is loaded and all is optional: it goes on without kvd if need be, and
            takes no slot any more.
        `is_idle`: nothing of it is loaded, saved or offered: it takes no slot, and only looks that
            nobody touches one any more. Not even that once `is_clear`.
        `takes_slots`: nothing is loaded in it: compute takes the slots, and the loader has no part.
        `kept_loads`, `kept_saves`: kvd was asked to keep the blocks of all layers.
        `failure`: why the step cannot go on, None while it can; set by `fail`.
        """
        self.requests = requests
        self.is_begun = False
        self.is_idle = False
        self.is_free = False
        self.is_clear = False
        self.takes_slots = False
        self.kept_loads: KeptStep | None = None
        self.kept_saves: KeptStep | None = None
        self.boot_id = boot_id
        self.is_shed = False
        self.end = end
        self.num_layers = num_layers
        self.layers: list[LayerState] = []
        self._lock = Condition()
        self._reached = -1
        self.failure: StepFailed | None = None
        self._failed: dict[str, StepFailed] = {}
        self._is_over = False
        self._saved: tuple[tuple[StepRequest, ...], list[SaveItem]] = ((), [])
        self._loaded: tuple[Missing, list[LoadItem]] = ([], [])
        self._skipped: tuple[frozenset[int], frozenset[str]] = (frozenset(), frozenset())
        self.loads_issued = Flag(threading.Lock())

    def unroll(self) -> None:
        """Make the states of its layers; an idle step has none.

        They take time, during which kvd looks at the step.
        """
        lock = threading.Lock()
        layers = range(self.num_layers)
        self.layers = [LayerState(Flag(lock), Flag(lock), Flag(lock)) for _ in layers]

    def goes_on(self, layer: int) -> bool:
        """Whether kvd is bound to hear of the step when this layer is behind us: of another layer,
        or of the end of what it keeps."""
        is_kept = self.kept_loads is not None or self.kept_saves is not None
        return is_kept or layer + 1 < self.num_layers

    def fail(self, failure: StepFailed) -> None:
        """The first failure counts; whoever waits for a layer wakes up."""
        with self._lock.lock:
            if self.failure is None:
                self.failure = failure
            self._lock.notify_all()
        for layer in self.layers:
            layer.acquired.set()
            layer.saved.set()

    @property
    def failed_requests(self) -> Mapping[str, StepFailed]:
        """Requests that have failed alone, and why: the step goes on without their rows."""
        with self._lock.lock:
            return dict(self._failed)

    @property
    def live(self) -> tuple[StepRequest, ...]:
        """The requests that have not failed."""
        failed = self._failed
        if not failed:
            return self.requests
        return tuple(request for request in self.requests if request.request not in failed)

    def skips(self, layers: frozenset[int], requests: frozenset[str]) -> None:
        """Rows of these requests are missing in these layers: none are loaded or saved there."""
        self._skipped = (layers, requests)

    def live_in(self, layer: int) -> tuple[StepRequest, ...]:
        """The requests that have not failed, and whose rows of this layer are there."""
        layers, requests = self._skipped
        if layer not in layers:
            return self.live
        return tuple(request for request in self.live if request.request not in requests)

    def save_items(
        self,
        requests: tuple[StepRequest, ...],
        make: Callable[[tuple[StepRequest, ...]], list[SaveItem]],
    ) -> list[SaveItem]:
        """What is saved of these requests: the same in every layer, so it is made once."""
        known = self._saved
        if known[0] != requests:
            known = self._saved = requests, make(requests)
        return known[1]

    def load_items(
        self, missing: Missing, make: Callable[[StepRequest, int], LoadItem]
    ) -> list[LoadItem]:
        """What is loaded of these requests: the same in nearly every layer.

        Threads that ask for different requests at the same time each get their own.
        """
        known = self._loaded
        if known[0] != missing:
            known = self._loaded = missing, [make(request, have) for request, have in missing]
        return known[1]

    def fail_request(self, request: str, failure: StepFailed) -> None:
        """One request's rows are not to be used; the first failure counts."""
        with self._lock.lock:
            self._failed.setdefault(request, failure)

    def seconds_left(self) -> float:
        """Time until the step's deadline."""
        left = self.end - time.monotonic_ns()
        return left / 1e9 if left > 0 else 0.0

    def reach(self, layer: int) -> None:
        """The compute thread is at this layer."""
        with self._lock.lock:
            self._reached = max(self._reached, layer)
            self._lock.notify_all()

    def go_without(self) -> None:
        """No slot is taken from here on, and nothing saved; the loader says it, and leaves."""
        self.is_shed = True
        for layer in self.layers:
            if layer.tenancy is None:
                layer.loaded.set()
            layer.acquired.set()

    def end_layers(self) -> None:
        """Compute has ended: layers that it did not reach are not wanted any more."""
        with self._lock.lock:
            self._is_over = True
            self._lock.notify_all()

    def wait_reached(self, layer: int) -> bool:
        """Wait until compute is at `layer` or beyond.

        Returns: False when the step has failed by then, or ended without it.
        """
        with self._lock.lock:
            self._lock.wait_for(
                lambda: self._reached >= layer or self.failure is not None or self._is_over,
                self.seconds_left(),
            )
            if self.failure is None and self._reached >= layer:
                return True
            if self._is_over:
                return False
        self.fail(StepFailed("deadline_exceeded", f"compute did not come to layer {layer}"))
        return False
