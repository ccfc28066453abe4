"""For child processes: giving up single powers of root, as a service or a container does."""

from __future__ import annotations

import ctypes
import os
from typing import Final

IPC_LOCK: Final = 14
SYS_RESOURCE: Final = 24

_VERSION_3: Final = 0x20080522


def give_up(*capabilities: int) -> None:
    """Drop capabilities (numbers of linux/capability.h) of this process for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # twice: effective, permitted, inheritable
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for number in capabilities:
        for which in range(3):
            sets[number // 32 * 3 + which] &= ~(1 << number % 32)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
