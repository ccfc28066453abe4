"""`python -m engine_shim.vllm.demo`: layerwise offload in a real vLLM, on this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    # Nothing is there yet that would have to be ended.
    signal.signal(signal.SIGINT, _leave)
    from engine_shim.vllm.demo.command import main as run

    return run(argv)


def _leave(*_: object) -> None:
    os.write(2, b"demo: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
