"""Copies memory without end, as an engine does that saves and loads layers."""

from __future__ import annotations

import os
from array import array

from kvd_kernels.host import Mapping, copy_spans

SIZE = 64 << 20


def main() -> None:
    """Copy until killed; the interpreter lock is free meanwhile, as in the shim."""
    mappings = []
    for name in ("a", "b"):
        fd = os.memfd_create(f"kvd-bench-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        mappings.append(Mapping(fd, SIZE, writable=True))
        mappings[-1].populate(0, SIZE)
    spans = array("Q", [0, 0, SIZE])
    while True:
        copy_spans(mappings[0], mappings[1], spans)


if __name__ == "__main__":
    main()
