"""NUMA: on which memory nodes the pages of a region are to be, and on which they are.

The policy is set on the mapping before its first page is made, so populating puts each page where
it belongs; pages that exist already stay where they are. The system calls are made directly: they
are three, and the library for them is on few machines.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvd.core.errors import LocalError
from kvd.core.units import align_down
from kvd.memory.memory_info import MemoryInfo, NumaNode

ANY: Final = "any"
INTERLEAVE: Final = "interleave"

SAMPLES: Final = 4096
"""Pages whose node is asked for: all of a small region, an even choice of a large one."""

_MPOL_BIND: Final = 2
_MPOL_INTERLEAVE: Final = 3
_ABSENT: Final = -errno.ENOENT
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)
# mbind and move_pages, by the machine that Python runs on.
_CALLS: Final = {"x86_64": (237, 279), "aarch64": (235, 239)}
# Any odd number with well-mixed bits: a regular step would meet one node of an interleaved region.
_MIX: Final = 0x9E3779B1


class Mapped(Protocol):
    """What is placed: `Mapping`, or a stand-in."""

    @property
    def address(self) -> int:
        """Address of byte 0."""

    @property
    def size(self) -> int:
        """Bytes."""

    def populate(self, offset: int, length: int) -> str:
        """Map the pages of a range."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the pages of a region are to be.

    asked: any, interleave or a number, as configured.
    nodes: the NUMA nodes that may hold pages; () for any.
    """

    asked: str = ANY
    nodes: tuple[int, ...] = ()

    @property
    def is_strict(self) -> bool:
        """Whether a page on another node than the one asked for is impossible."""
        return bool(self.nodes) and self.asked != INTERLEAVE

    def narrow(self, info: MemoryInfo) -> MemoryInfo:
        """Return what the host can give to such a region."""
        return info.on_node(self.nodes[0]) if self.is_strict else info

    def strays(self, found: Sequence[tuple[int, int]]) -> int:
        """Return the bytes that are elsewhere than asked; found as of `bytes_by_node`."""
        return sum(count for node, count in found if self.nodes and node not in self.nodes)


ANYWHERE: Final = Placement()


def choose_placement(region: str, asked: str, info: MemoryInfo) -> Placement:
    """Say which nodes a region may use.

    Args:
        region: name for messages.
        asked: any, interleave or a node's number.
        info: the host at this moment.

    Raises: LocalError(numa_unusable): no such node, or the kernel tells of none.
    """
    if asked == ANY:
        return ANYWHERE
    there = tuple(node.number for node in info.nodes)
    if not there:
        why = "this kernel tells of no NUMA nodes"
        raise _unusable(region, asked, why, 'Set numa_node to "any".')
    if asked == INTERLEAVE:
        return Placement(asked, there)
    if int(asked) not in there:
        why = f"kvd may use memory of {_named(info.nodes)}"
        fix = 'Set numa_node to one of these, to "interleave" or to "any".'
        raise _unusable(region, asked, why, fix)
    return Placement(str(int(asked)), (int(asked),))


def place(region: str, mapping: Mapped, placement: Placement) -> None:
    """Set the policy of a mapping of which no page exists yet.

    Raises: LocalError(numa_unusable): the kernel, or a sandbox, does not allow it.
    """
    if not placement.nodes:
        return
    words = (ctypes.c_ulong * (max(placement.nodes) // _WORD_BITS + 1))()
    for node in placement.nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    mode = _MPOL_BIND if placement.is_strict else _MPOL_INTERLEAVE
    # The kernel reads one bit less than it is told.
    code = _call(0, mapping.address, mapping.size, mode, words, len(words) * _WORD_BITS + 1, 0)
    if code:
        why = f"the kernel refused ({os.strerror(code)})"
        fix = 'Set numa_node to "any".'
        if code in (errno.EPERM, errno.ENOSYS):
            fix = 'Let kvd call mbind (in a container: CAP_SYS_NICE), or set numa_node to "any".'
        raise _unusable(region, placement.asked, why, fix)


def bytes_by_node(mapping: Mapped, populated: int, page_size: int) -> tuple[tuple[int, int], ...]:
    """Ask the kernel on which nodes the populated part is; (node, bytes), by node.

    Exact up to SAMPLES pages, an estimate beyond. () where the kernel does not tell.

    Args: populated: bytes from the start that are resident, in the file if not in this mapping.
    """
    pages = populated // page_size
    count = min(pages, SAMPLES)
    if count <= 0:
        return ()
    offsets = []
    for i in range(count):
        first, end = i * pages // count, (i + 1) * pages // count
        offsets.append((first + i * _MIX % (end - first)) * page_size)
    addresses = (ctypes.c_void_p * count)(*(mapping.address + offset for offset in offsets))
    status = (ctypes.c_int * count)()
    if _call(1, 0, count, addresses, None, status, 0):
        return ()
    unmapped = [offset for offset, node in zip(offsets, status, strict=True) if node == _ABSENT]
    if unmapped:  # pages that were adopted are known here once they are mapped here
        for offset in unmapped:
            mapping.populate(offset, 1)
        _call(1, 0, count, addresses, None, status, 0)
    known = Counter(node for node in status if node >= 0)
    total = known.total()
    return tuple(
        (node, align_down(populated * known[node] // total, page_size)) for node in sorted(known)
    )


def _named(nodes: Sequence[NumaNode]) -> str:
    numbers = ", ".join(str(node.number) for node in nodes)
    return f"NUMA node {numbers} only" if len(nodes) == 1 else f"the NUMA nodes {numbers}"


def _unusable(region: str, asked: str, why: str, fix: str) -> LocalError:
    where = "interleaved over NUMA nodes" if asked == INTERLEAVE else f"on NUMA node {asked}"
    return LocalError("numa_unusable", region=region, where=where, why=why, fix=fix)


def _call(which: int, *arguments: object) -> int:
    """Make a system call; returns 0 or its errno."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    words = (ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    return 0 if libc.syscall(ctypes.c_long(numbers[which]), *words) == 0 else ctypes.get_errno()
