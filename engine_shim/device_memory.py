"""Device memory that is host memory: what the CPU device and the simulated ones hand out."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from engine_shim.device import DeviceCode, DeviceError, DeviceMemory, check_name
from kvd_kernels.host import Mapping

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemfdMemory:
    """A memfd and its mapping; other processes map the same bytes by the fd."""

    def __init__(self, nbytes: int, name: str) -> None:
        """Make it; errors as `Device.alloc`. On an error nothing is left."""
        check_name("memory", name)
        if nbytes < 1:
            raise ValueError(f"nbytes of memory {name} is {nbytes}; give 1 or more")
        self._name = name
        with ExitStack() as undo:
            try:
                fd = os.memfd_create(f"kvd-device-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, fd)
                os.ftruncate(fd, nbytes)
                # Nobody can cut the file short: reads in another process would be SIGBUS.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                self._mapping = Mapping(fd, nbytes, writable=True)
            except OSError as error:
                raise DeviceError(
                    DeviceCode.MEMORY_SHORT,
                    f"memory {name} of {nbytes} bytes cannot be made ({error}); ask for less",
                ) from error
            undo.pop_all()
        self._fd = fd
        self._closed = False

    @property
    def name(self) -> str:
        """The name given at `alloc`."""
        return self._name

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._mapping.size

    @property
    def mapping(self) -> Mapping:
        """All of it, as mapped in this process."""
        return self._mapping

    @property
    def fd(self) -> int:
        """The file, readable and writable; owned here, duplicated by sending it.

        Raises: ValueError once closed: the number may be another file's by now.
        """
        if self._closed:
            raise ValueError(f"memory {self._name} is closed; take its fd before")
        return self._fd

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Copy bytes out."""
        return self._mapping.read_bytes(offset, length)

    def write_bytes(self, offset: int, data: Buffer) -> None:
        """Copy bytes in."""
        self._mapping.write_bytes(offset, data)

    def close(self) -> None:
        """Unmap and close the file; idempotent. BufferError while views exist."""
        if self._closed:
            return
        self._mapping.close()
        self._closed = True
        os.close(self._fd)


def mapping_of(argument: str, end: DeviceMemory | Mapping) -> Mapping:
    """Return the mapping of one end of a copy; ValueError naming the argument if it has none."""
    if isinstance(end, Mapping):
        return end
    if isinstance(end, MemfdMemory):
        return end.mapping
    raise ValueError(
        f"{argument} is a {type(end).__name__}; give memory of this device, or a Mapping"
    )
