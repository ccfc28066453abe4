"""What one rank's rows are in: a decode region of kvd, and hot buffers before it.

A kvd that was restarted may have lost the region. What this process has mapped of it is whole, but
nobody else knows of it any more: it is given up, and made anew with other hot buffers.
"""

from __future__ import annotations

import threading
from typing import Final

from engine_shim.client import KvdClient, KvdRefused
from engine_shim.client.options import end_after, left_s
from engine_shim.client.session import LinkState
from engine_shim.device import Device, DeviceError
from engine_shim.hot import HotBuffers, HotOptions
from engine_shim.vllm.sparse_plan import SparsePlan

PAUSE_S: Final = 0.05
"""Between two attempts to get a region."""

MAY_PASS: Final = frozenset({"busy", "deadline_exceeded", "memory_short", "starting"})
"""Refusals that another attempt may not meet. Memory is short while other ranks still have mapped
what was lost."""


class SparseMemory:
    """The region's mapping and the hot buffers, together: both there, or neither."""

    def __init__(
        self, client: KvdClient, name: str, plan: SparsePlan, device: Device, options: HotOptions
    ) -> None:
        """Nothing is there before `open`. Args: name: of the region."""
        self._client = client
        self._name = name
        self._plan = plan
        self._device = device
        self._options = options
        self._hot: HotBuffers | None = None

    def open(self, deadline_s: float) -> tuple[HotBuffers, memoryview]:
        """Have kvd make the region, or find it made; make the hot buffers.

        Returns: the hot buffers and a view of the region's bytes, to be let go before `lose`.
        Raises: KvdRefused when that is not done by the deadline, DeviceError when device memory is
                short; `open` may be called again then.
        """
        region, end = self._plan.region, end_after(deadline_s)
        pause = threading.Event()
        while True:
            try:
                self._client.wait_attached(left_s(end))
                mapping = self._client.region_create(
                    self._name,
                    region.num_layers,
                    region.num_blocks,
                    region.block_tokens,
                    region.row_bytes,
                    left_s(end),
                )
                break
            except KvdRefused as refusal:
                may_pass = refusal.code in MAY_PASS or self._client.state is LinkState.LOST
                if not may_pass or left_s(end) <= PAUSE_S:
                    raise
            pause.wait(PAUSE_S)
        groups = self._plan.groups
        self._hot = HotBuffers(self._device, mapping, region, groups, self._options)
        return self._hot, mapping.view()

    def close(self) -> None:
        """Give the hot buffers back, once no copy into them runs. Idempotent.

        Raises: DeviceError when a copy does not end in time; BufferError while views exist.
        """
        if self._hot is None:
            return
        try:
            self._hot.shut()
        except DeviceError:
            # A stream that is closed first tells of a load that failed and nobody waited for.
            self._hot.shut()
        self._hot = None

    def lose(self) -> None:
        """Give up what kvd has lost. Raises: as `close`; it may be called again then."""
        self.close()
        self._client.region_forget(self._name)
