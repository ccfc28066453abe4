"""Which vLLM this package knows. It uses parts of vLLM that no interface promises to keep."""

from __future__ import annotations

from typing import Final

from engine_shim.vllm.errors import UnsupportedEngine

SUPPORTED: Final = "0.32"
"""Major and minor version of the vLLM whose inner parts were read and tested."""


def need_known_vllm() -> None:
    """Refuse a vLLM whose inner parts may differ from those this package was written for.

    Raises: UnsupportedEngine naming both versions.
    """
    import vllm

    if not str(vllm.__version__).startswith(f"{SUPPORTED}."):
        raise UnsupportedEngine(
            f"kvd knows vLLM {SUPPORTED}.x, this is {vllm.__version__}: install vLLM {SUPPORTED}, "
            "or a kvd that knows this one"
        )
