"""Engines with sparse decode offload, and what tests ask of them."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
from typing import Any, Final

from engine_shim.vllm.sparse_options import KEY
from engine_shim.vllm.sparse_scheduler import SparseScheduler
from engine_shim.vllm.sparse_worker import SparseWorker
from kvd.wire.protocol import HOLD_SOCKET
from tests.vllm.engines import Engine
from tests.vllm.node import Node

SPARSE: Final = ("deepseek_v32", "glm_moe_dsa")
TOPK: Final = 64
BLOCK: Final = 128
SLOTS: Final = 128
HOW: Final = {"max_num_batched_tokens": 256}


class SparseNode(Node):
    """A kvd for engines that decode: its pool is of no use to them."""

    def __init__(self, *settings: str) -> None:
        super().__init__("pool.size=16MiB", "regions.huge_pages=off", *settings)

    def sparse(
        self,
        *,
        policy: str = "fail",
        role: str = "kv_consumer",
        deadline_s: float = 30.0,
        **given: object,
    ) -> Any:
        """`kv_transfer_config`; `given` are keys of `sparse_kv_offload_config`."""
        config = {
            "enabled": True,
            "topk_buffer_size": SLOTS,
            "dram_size_per_dp_GB": 0.125,
            **given,
        }
        more = {KEY: config, "kvd_deadline_s": deadline_s}
        return self.transfer(policy=policy, role=role, **more)

    def set(self, setting: str) -> None:
        """Let the next start have another setting, KEY=VALUE; a later one wins."""
        self._command += ["--set", setting]

    def kill_holder(self) -> None:
        """kill -9 of what keeps the memory of a kvd that was killed, and wait for its end."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.connect(os.fspath(self.runtime_dir / HOLD_SOCKET))
            pid, _, _ = struct.unpack("3i", probe.getsockopt(1, socket.SO_PEERCRED, 12))
        with os.fdopen(os.pidfd_open(pid), "rb") as process:
            signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
            assert select.select([process], [], [], 10.0)[0], "the holder outlives kill -9"

    def figures(self) -> dict[str, float]:
        """What the one engine's worker said last."""
        (engine,) = (one for one in self.engines() if one["members"])
        (worker,) = (one for one in engine["members"] if one["member"] == "worker0")
        return dict(worker["stats"])


def worker_of(engine: Engine) -> SparseWorker:
    """The worker's side of an engine in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._sparse
    assert isinstance(worker, SparseWorker)
    return worker


def scheduler_of(engine: Engine) -> SparseScheduler:
    """The scheduler's side of an engine in this process."""
    side = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector.kvd_scheduler
    assert isinstance(side, SparseScheduler)
    return side


def told(node: SparseNode, engine: Engine) -> dict[str, float]:
    """Figures as they are now, by way of kvd."""
    worker_of(engine).tell()
    return node.figures()
