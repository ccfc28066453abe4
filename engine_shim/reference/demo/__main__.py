"""`python -m engine_shim.reference.demo`: the main job, end to end, on this machine."""

from __future__ import annotations

import sys

from engine_shim.reference.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
