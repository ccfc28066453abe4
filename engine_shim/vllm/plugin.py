"""The plugin that vLLM loads in every process (entry point `vllm.general_plugins`: kvd)."""

from __future__ import annotations

import os
from typing import Final

NAME: Final = "KvdConnector"
CPU_SPARSE: Final = "KVD_CPU_SPARSE"
"""Environment variable: 1 lets models with sparse attention run on vLLM's CPU platform."""


def register() -> None:
    """Make kvd's connector known and wrap vLLM's planning; harmless when it was done.

    A vLLM that is not supported is left alone here: it is refused once the connector is asked for.

    Raises: ValueError when another connector has taken the name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from engine_shim.vllm import adapter

    known = KVConnectorFactory._registry.get(NAME)
    if known is None:
        KVConnectorFactory.register_connector(NAME, "engine_shim.vllm.connector", NAME)
    try:
        adapter.install()
    except adapter.UnsupportedEngine:
        return
    if os.environ.get(CPU_SPARSE) == "1":
        from engine_shim.vllm import cpu_sparse

        cpu_sparse.install()
