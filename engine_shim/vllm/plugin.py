"""The plugin that vLLM loads by the entry point `kvd` of the group `vllm.general_plugins`.

vLLM calls `register` in every process of an engine, and may do so more than once.
"""

from __future__ import annotations

import os
from typing import Final

from engine_shim.vllm.errors import UnsupportedEngine
from engine_shim.vllm.versions import need_known_vllm

CONNECTOR: Final = "KvdConnector"
SPARSE_ON_CPU: Final = "KVD_CPU_SPARSE"
_ON_OR_OFF: Final = frozenset({"", "0", "1"})


def register() -> None:
    """Add to vLLM what kvd has for it: its connector, and the planning that goes with it.

    With `KVD_CPU_SPARSE=1` models with sparse attention (DSA) run on the CPU, see `cpu_sparse`.
    A vLLM that kvd does not know is left alone, unless that is asked for: it may serve without kvd,
    and kvd's connector refuses it.

    Raises: ValueError for another value of that variable, or when another connector has kvd's name.
            UnsupportedEngine for a vLLM that kvd does not know.
    """
    asked = os.environ.get(SPARSE_ON_CPU, "")
    if asked not in _ON_OR_OFF:
        raise ValueError(f"{SPARSE_ON_CPU} is {asked!r}: set it to 1, or unset it")
    try:
        need_known_vllm()  # before parts of vLLM are imported that another may not have
    except UnsupportedEngine:
        if asked == "1":
            raise
        return
    add_connector()
    if asked == "1":
        from engine_shim.vllm import cpu_sparse

        cpu_sparse.install()


def add_connector() -> None:
    """Register the connector and wrap vLLM's planning; harmless when it was done.

    Raises: ValueError when another connector has the name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from engine_shim.vllm import adapter

    known = KVConnectorFactory._registry.get(CONNECTOR)
    if known is None:
        KVConnectorFactory.register_connector(CONNECTOR, "engine_shim.vllm.connector", CONNECTOR)
    elif not known().__module__.startswith("engine_shim."):
        raise ValueError(f"a connector named {CONNECTOR} is registered by {known().__module__}")
    adapter.install()
