"""Attaching to a kvd on a kernel that gives no pidfds: the passed one is proven, or refused.

The socket runs in this process, told not to ask the kernel (SO_PEERPIDFD, Linux 6.5).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import uvloop

from bench.wire_client import WireClient
from kvd.config.load import load_config
from kvd.server.attach_socket import AttachSocket
from kvd.server.logs import Logs
from kvd.server.node import Node
from kvd.wire import attach
from kvd.wire.protocol import ATTACH_SOCKET
from tests.integration.live_kvd import until
from tests.integration.raw_attach import RawAttach, member_message, memfd, own_pidfd


class OldKernelKvd:
    """attach.sock on a loop in a thread; there is no pool, and nothing else listens."""

    def __init__(self, directory: Path) -> None:
        self.runtime_dir = directory
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        logs = Logs("error", "json", sys.__stderr__)
        self.node = Node(load_config(None, {}, {}), logs)
        path = self.runtime_dir / ATTACH_SOCKET
        sock = AttachSocket(self.node, path, use_kernel_pidfd=False)
        sock.start()
        self._started.set()
        await self._stop.wait()
        sock.close()
        self.node.close_sessions()
        self.node.memory.close(keep=False)
        logs.close()

    def members(self) -> list[str]:
        """Names of attached members."""
        return sorted(session.name for session in list(self.node.sessions.members.values()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture
def kvd() -> Iterator[OldKernelKvd]:
    with tempfile.TemporaryDirectory(prefix="kvd-") as name, OldKernelKvd(Path(name)) as made:
        yield made


@pytest.fixture
def raw(kvd: OldKernelKvd) -> Iterator[RawAttach]:
    with RawAttach(kvd.runtime_dir) as connection:
        yield connection


@pytest.fixture
def foreign() -> Iterator[int]:
    """The pidfd of a process that is not us and lives."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        pidfd = os.pidfd_open(process.pid)
        yield pidfd
        os.close(pidfd)
        process.kill()


@pytest.fixture
def dead() -> Iterator[int]:
    """The pidfd of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        pidfd = os.pidfd_open(process.pid)
    yield pidfd
    os.close(pidfd)


def test_a_member_must_pass_its_pidfd(kvd: OldKernelKvd, raw: RawAttach) -> None:
    assert raw.refusal(member_message()) == "frame_malformed"
    assert kvd.members() == []


@pytest.mark.parametrize("whose", ["foreign", "dead"])
def test_the_pidfd_of_another_process_is_not_believed(
    kvd: OldKernelKvd, raw: RawAttach, whose: str, request: pytest.FixtureRequest
) -> None:
    assert raw.refusal(member_message(), [request.getfixturevalue(whose)]) == "frame_malformed"
    assert kvd.members() == []


@pytest.mark.parametrize("name", ["/dev/zero", "/proc/self/status", "/", "/proc/self/fdinfo/0"])
def test_what_is_no_pidfd_is_not_believed(kvd: OldKernelKvd, raw: RawAttach, name: str) -> None:
    fd = os.open(name, os.O_RDONLY)
    try:
        assert raw.refusal(member_message(), [fd]) == "frame_malformed"
    finally:
        os.close(fd)
    with memfd(4096) as made:
        assert raw.refusal(member_message(), [made]) == "frame_malformed"
    assert kvd.members() == []


def test_device_memory_in_the_place_of_the_pidfd(kvd: OldKernelKvd, raw: RawAttach) -> None:
    with memfd(4096) as made, own_pidfd() as pidfd:
        message = member_message(num_slots=1, device_bytes=4096)
        assert raw.refusal(message, [made]) == "frame_malformed"
        assert raw.refusal(message, [made, pidfd]) == "frame_malformed"
        assert isinstance(raw.ask(message, [pidfd, made]), attach.Attached)
    assert kvd.members() == ["e/w"]


def test_a_refused_attach_keeps_no_descriptor(kvd: OldKernelKvd, foreign: int) -> None:
    with RawAttach(kvd.runtime_dir) as connection:
        connection.refusal(member_message())
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            connection.refusal(member_message(), [foreign])
            connection.refusal(member_message(device_bytes=1), [foreign, foreign])
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)


MEMBER = """
import sys
from pathlib import Path
from bench.wire_client import WireClient
client = WireClient(Path(sys.argv[1]), "child", "w", num_slots=2)
print("attached", flush=True)
sys.stdin.read()
"""


def test_a_death_is_seen_by_the_passed_pidfd(kvd: OldKernelKvd) -> None:
    """The connection stays open in another process, so that its end tells nothing."""
    client = WireClient(kvd.runtime_dir, "parent", "w")
    command = [sys.executable, "-c", MEMBER, str(kvd.runtime_dir)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"attached\n"
        assert kvd.members() == ["child/w", "parent/w"]
        child.kill()
        child.wait()
    until(lambda: kvd.members() == ["parent/w"])
    client.close()
    until(lambda: kvd.members() == [])
