"""Keeping a region out of the swap space (mlock), where huge pages never go anyway."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from typing import Final

from kvd.core.errors import LocalError
from kvd.core.units import format_size
from kvd.memory.numa import Mapped

# Pages are locked as they come: locking them at once would populate the region in one go.
_MLOCK_ONFAULT: Final = 1


def lock_pages(region: str, mapping: Mapped, *, at_once: bool = False) -> None:
    """Lock every page of a mapping that comes from now on; ends with the mapping.

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
