"""The block index in native memory: no key is a Python object, however many there are."""

from __future__ import annotations

from kvd_kernels.host import BlockIndex


class NativeIndex(BlockIndex):
    """`kvd.core.prefix.BlockIndex` over `kvd_kernels.host.BlockIndex`.

    Its methods are the native ones; what they mean is the same. Its room comes with the pool
    (`clear`), since only then the number of blocks is known.
    """

    __slots__ = ()

    def __init__(self) -> None:
        """An index without room."""
        super().__init__(0)
