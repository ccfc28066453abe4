"""A kvd for engines of this tier, and what a test does to it from outside."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Final, Self

from engine_shim.client import KvdClient, MemberIdentity
from engine_shim.reference.demo.processes import OwnDaemon

PYTHON: Final = os.environ.get("KVD_TEST_PYTHON", sys.executable)
POOL: Final = ("pool.size=192MiB", "pool.huge_pages=off", "pool.headroom=0B")


class Node(OwnDaemon):
    """One kvd with a pool of 192 MiB; nothing outlives it unless `settings` say so."""

    def __init__(self, *settings: str) -> None:
        super().__init__(*POOL, *settings, python=PYTHON)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except RuntimeError:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def transfer(self, *, policy: str = "fail", role: str = "kv_producer", **extra: Any) -> Any:
        """`kv_transfer_config` for this node; `extra` are options of the connector."""
        return {
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "engine_shim.vllm",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"kvd_runtime_dir": str(self.runtime_dir), **extra},
        }

    def rolling(self, buffers: int = 3, *, policy: str = "fail", **extra: Any) -> Any:
        """The same, with layers that share so many buffers."""
        return self.transfer(
            policy=policy, offload="rolling", layerwise_num_shared_buffers=buffers, **extra
        )

    def watcher(self) -> KvdClient:
        """A member that only looks; not open yet."""
        return KvdClient(MemberIdentity(engine="watcher", member="watcher"), str(self.runtime_dir))

    def blocks(self) -> dict[str, int]:
        """Blocks of the pool by state."""
        status, document = self.get("/v1/status")
        assert status == 200, document
        return dict(document["pool"]["blocks"])

    def counter(self, name: str) -> int:
        """A counter of /metrics, by its name without prefix and suffix."""
        _, text = self.get("/metrics")
        found = re.search(rf"^kvd_{name}_total (\S+)$", str(text), re.MULTILINE)
        assert found is not None, f"no counter {name}"
        return int(float(found[1]))

    def engines(self) -> Sequence[dict[str, Any]]:
        """Attached engines."""
        status, document = self.get("/v1/engines")
        assert status == 200, document
        return list(document["items"])

    def story(self, of: str) -> str:
        """What kvd tells of a block, slot or request, as JSON text."""
        return str(self.get(f"/v1/story/{of}")[1])
