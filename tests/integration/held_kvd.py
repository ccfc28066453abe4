"""A real kvd whose memory a holder keeps."""

from __future__ import annotations

import os
import signal
import socket
import struct

from typing_extensions import override

from kvd.memory.layout_v1 import HEADER_BYTES, SUPERBLOCK_BYTES
from kvd.wire.protocol import HOLD_SOCKET
from tests.integration.live_kvd import LiveKvd, until


class HeldKvd(LiveKvd):
    """It starts a holder; both are gone after `close`."""

    def __init__(self, *settings: str) -> None:
        super().__init__("pool.owner=auto", "pool.hold_ttl=30s", *settings)

    def crash(self) -> None:
        """kill -9, and wait until it is dead."""
        self.stop(signal.SIGKILL)

    def holder_pid(self) -> int:
        """Of the process that listens on hold.sock, 0 when there is none."""
        path = self.runtime_dir / HOLD_SOCKET
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(os.fspath(path))
            except OSError:
                return 0
            return int(struct.unpack("3i", probe.getsockopt(1, socket.SO_PEERCRED, 12))[0])

    def kill_holder(self) -> None:
        """kill -9 of the holder, and wait until it is dead."""
        pid = self.holder_pid()
        assert pid
        with os.fdopen(os.pidfd_open(pid), "rb") as pidfd:
            os.kill(pid, signal.SIGKILL)
            until(lambda: not _lives(pidfd.fileno()))

    def configure(self, *settings: str) -> None:
        """Other settings from the next start on."""
        for setting in settings:
            self._command += ["--set", setting]

    def damage_header(self, block: int) -> None:
        """Change a byte in the middle of a block's header."""
        self._damage(SUPERBLOCK_BYTES + block * HEADER_BYTES + HEADER_BYTES // 2)

    def damage_superblock(self) -> None:
        """Change a byte of the pool's shape."""
        self._damage(16)

    def resident_bytes(self, region: str) -> int:
        """Memory that a region's file takes, as the kernel says."""
        return os.stat(self._file(region)).st_blocks * 512

    def _file(self, region: str) -> str:
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            path = f"/proc/{self.pid}/fd/{fd}"
            if os.readlink(path).split(" ")[0] == f"/memfd:kvd-{region}":
                return path
        raise AssertionError(f"kvd has no region {region}")

    def _damage(self, offset: int) -> None:
        file = os.open(self._file("pool-meta"), os.O_RDWR)
        was = os.pread(file, 1, offset)[0]
        os.pwrite(file, bytes([was ^ 0x5A]), offset)
        os.close(file)

    @override
    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.crash()
        if self.holder_pid():
            self.kill_holder()
        super().close()


def _lives(pidfd: int) -> bool:
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)
