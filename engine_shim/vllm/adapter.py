"""The one file that knows which vLLM it faces, and what kvd's connector may use of it.

Supported is 0.32 with model runner V1 (`v032`): what it reads of vLLM's plans, how buffers are
placed and their memory is made mappable, and what has to be wrapped because vLLM has no hook for it
(`v032.patches`). The rest of the connector reaches vLLM through this module and through the
connector interface only; another version is refused by `need_known_vllm`.
"""

from __future__ import annotations

from engine_shim.vllm.errors import UnsupportedEngine
from engine_shim.vllm.v032.config import (
    check_engine,
    connector_name,
    engine_name,
    gates_ahead,
    hash_probe,
    hashes_per_block,
    options_of,
)
from engine_shim.vllm.v032.memory import (
    add_layer_hooks,
    allocation_in,
    check_placed,
    forget_prefixes,
    plan_of,
    rebind,
    turn_writes_off,
)
from engine_shim.vllm.v032.specs import check_device, rank_of
from engine_shim.vllm.versions import need_known_vllm

__all__ = [
    "UnsupportedEngine",
    "add_layer_hooks",
    "allocation_in",
    "check_device",
    "check_engine",
    "check_placed",
    "connector_name",
    "engine_name",
    "forget_prefixes",
    "gates_ahead",
    "hash_probe",
    "hashes_per_block",
    "install",
    "need_known_vllm",
    "options_of",
    "plan_of",
    "rank_of",
    "rebind",
    "turn_writes_off",
    "version",
]


def version() -> str:
    """The version of vLLM."""
    from vllm.version import __version__

    return str(__version__)


def install() -> None:
    """Wrap what vLLM has no hook for, once in a process.

    Raises: UnsupportedEngine.
    """
    need_known_vllm()
    from engine_shim.vllm.v032 import patches

    patches.install()
