"""Engines with sparse decode offload, and what tests ask of them."""

from __future__ import annotations

from typing import Any, Final

from engine_shim.vllm.sparse_options import KEY
from engine_shim.vllm.sparse_worker import SparseWorker
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

    def sparse(self, *, policy: str = "fail", role: str = "kv_consumer", **given: object) -> Any:
        """`kv_transfer_config`; `given` are keys of `sparse_kv_offload_config`."""
        config = {
            "enabled": True,
            "topk_buffer_size": SLOTS,
            "dram_size_per_dp_GB": 0.125,
            **given,
        }
        return self.transfer(policy=policy, role=role, **{KEY: config})

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


def told(node: SparseNode, engine: Engine) -> dict[str, float]:
    """Figures as they are now, by way of kvd."""
    worker_of(engine).tell()
    return node.figures()
