"""kvd's connectors for vLLM (`kv_connector_module_path`: `engine_shim.vllm`).

`KvdConnector` and `AscendStoreConnector` (the name of the layerwise guide) are the same connector.
They are imported when they are asked for: vLLM loads the plugin in processes that need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_shim.vllm.connector import KvdConnector

    AscendStoreConnector = KvdConnector

__all__ = ["AscendStoreConnector", "KvdConnector"]


def __getattr__(name: str) -> object:
    """Import a connector.

    Raises: AttributeError for another name.
    """
    if name in __all__:
        from engine_shim.vllm.connector import KvdConnector

        return KvdConnector
    raise AttributeError(f"engine_shim.vllm has no {name}; it has {', '.join(__all__)}")
