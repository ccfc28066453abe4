"""The plugin that vLLM loads by the entry point `kvd` of the group `vllm.general_plugins`.

vLLM calls `register` in every process of an engine, and may do so more than once. The module loads
nothing by itself: an engine that uses no part of kvd pays for the import of this file alone.
"""

from __future__ import annotations

import os
from typing import Final

SPARSE_ON_CPU: Final = "KVD_CPU_SPARSE"
_ON_OR_OFF: Final = frozenset({"", "0", "1"})


def register() -> None:
    """Add to vLLM what kvd has for it.

    With `KVD_CPU_SPARSE=1` models with sparse attention (DSA) run on the CPU, see `cpu_sparse`.

    Raises: ValueError for another value of that variable.
            UnknownEngineError for a vLLM that kvd does not know.
    """
    asked = os.environ.get(SPARSE_ON_CPU, "")
    if asked not in _ON_OR_OFF:
        raise ValueError(f"{SPARSE_ON_CPU} is {asked!r}: set it to 1, or unset it")
    if asked == "1":
        from engine_shim.vllm.versions import need_known_vllm

        need_known_vllm()  # before parts of vLLM are imported that another may not have
        from engine_shim.vllm import cpu_sparse

        cpu_sparse.install()
