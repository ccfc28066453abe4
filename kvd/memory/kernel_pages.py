"""What the kernel is asked about the pages of a mapping: to make, to keep and to count them."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path
from typing import Final

from kvd.core.errors import LocalError
from kvd.core.units import KIB, format_size
from kvd.memory.numa import Mapped

_MADV_HUGEPAGE: Final = 14
# Pages are locked as they come: locking them at once would populate the region in one go.
_MLOCK_ONFAULT: Final = 1


def advise_huge(mapping: Mapped) -> None:
    """Ask for transparent huge pages; without them the region works on ordinary pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(mapping.address, mapping.size, _MADV_HUGEPAGE)


def lock_pages(region: str, mapping: Mapped, *, at_once: bool = False) -> None:
    """Keep every page of a mapping that comes from now on from the swap space, until it ends.

    Args: at_once: the pages that there are as well; makes those that are not there.

    Raises: LocalError(memory_short): this process may not lock so much.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    if libc.mlock2(mapping.address, mapping.size, 0 if at_once else _MLOCK_ONFAULT) == 0:
        return
    code = ctypes.get_errno()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    forbidden = code in (errno.ENOMEM, errno.EPERM) and soft != resource.RLIM_INFINITY
    raise LocalError(
        "memory_short",
        region=region,
        need=f"{format_size(mapping.size)} of locked memory",
        free=format_size(soft) if forbidden else "a part",
        limit="ulimit -l" if forbidden else f"the kernel refused: {os.strerror(code)}",
        fix="Set LimitMEMLOCK=infinity in the unit (or ulimit -l), or pool.lock = false.",
    )


def read_smaps(address: int) -> dict[str, int]:
    """Return the sizes (bytes) that /proc/self/smaps shows for the mapping at an address."""
    found: dict[str, int] = {}
    inside = False
    with Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            head, _, rest = line.partition(" ")
            if head.endswith(":"):
                parts = rest.split()
                if inside and len(parts) == 2 and parts[1] == "kB":
                    found[head[:-1]] = int(parts[0]) * KIB
            elif inside:
                break
            else:
                low, _, high = head.partition("-")
                inside = int(low, 16) <= address < int(high, 16)
    return found
