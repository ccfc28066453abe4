"""What attach.sock of a real kvd is told and passed, and must not believe or keep."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvd.wire import attach
from kvd.wire import messages as msg
from kvd.wire.codec import attach_request_codec
from kvd.wire.protocol import ATTACH_BYTES_MAX
from kvd_kernels.host import Mapping
from tests.integration.live_kvd import MIB, LiveKvd, until
from tests.integration.raw_attach import RawAttach, member_message, memfd, own_pidfd
from tests.integration.raw_frames import LAYOUT, RawMember, ext, pack

DEVICE = 1 << 20
encode = attach_request_codec().encode


@pytest.fixture(scope="module")
def kvd() -> Iterator[LiveKvd]:
    with LiveKvd() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(kvd: LiveKvd) -> Iterator[None]:
    """After each test kvd has the descriptors and sessions that it had before, and works."""
    num_fds, rss = kvd.num_fds(), kvd.rss_bytes()
    yield
    until(lambda: kvd.num_fds() <= num_fds, f"descriptors: {kvd.descriptors()}")
    assert kvd.sessions() == {"member": 0, "reader": 0}
    assert kvd.rss_bytes() - rss < 16 * MIB
    with RawMember(kvd.runtime_dir, "after") as client:
        client.hello(LAYOUT)
    until(lambda: kvd.num_fds() <= num_fds)


@pytest.fixture
def raw(kvd: LiveKvd) -> Iterator[RawAttach]:
    with RawAttach(kvd.runtime_dir) as connection:
        yield connection


@pytest.fixture
def pidfd() -> Iterator[int]:
    with own_pidfd() as made:
        yield made


# Messages -----------------------------------------------------------------------------------------


def test_garbage_is_refused_and_the_connection_may_try_again(kvd: LiveKvd, raw: RawAttach) -> None:
    draw = random.Random(3)
    before = sum(v for k, v in kvd.status()["refused"].items() if k.startswith("attach."))
    for _ in range(300):
        assert raw.refusal(draw.randbytes(draw.randrange(1, 300))) in (
            "frame_malformed",
            "op_unknown",
        )
    refused = kvd.status()["refused"]
    assert sum(v for k, v in refused.items() if k.startswith("attach.")) == before + 300
    assert isinstance(raw.ask(member_message()), attach.Attached)


def test_cut_messages(raw: RawAttach, pidfd: int) -> None:
    whole = member_message()
    for length in range(1, len(whole)):
        assert raw.refusal(whole[:length], [pidfd]) == "frame_malformed"


@pytest.mark.parametrize(
    "message",
    [
        b"\x91" * 100_000,
        pack(["member", 1, 1, "e", "w", 7]),
        pack(["member", 1, 1, "e", "w", -1, 0, 0]),
        pack(["member", 1, 1, "e\n", "w", 7, 0, 0]),
        pack(["member", 1, 1, "e", "../w", 7, 0, 0]),
        pack(["member", 1, 1, "e", "w", 1.5, 0, 0]),
        pack(["member", 1, 1, b"e", "w", 7, 0, 0]),
        pack(["member", 1, 1, "e", "w", ext(1, b"7"), 0, 0]),
        pack(["reader", 1, 1, b"short", b"n", b"t"]),
        pack(["map_region", "g"]),
        pack(["map_member", "e", "w", 7]),
        pack(["attached", 1, b"b" * 16, b"t" * 16, 0, 0]),
    ],
    ids=lambda message: message[:24].hex(),
)
def test_messages_that_are_not_expected(raw: RawAttach, message: bytes) -> None:
    assert raw.refusal(message) in ("frame_malformed", "op_unknown")


def test_appended_fields_are_ignored(raw: RawAttach) -> None:
    message = pack(["member", 1, 1, "e", "w", 7, 0, 0, "later", {"a": [1]}])
    assert isinstance(raw.ask(message), attach.Attached)


def test_a_message_over_the_limit(raw: RawAttach) -> None:
    assert raw.refusal(b"\xc4" * ATTACH_BYTES_MAX) == "frame_malformed"
    assert raw.refusal(b"x" * (ATTACH_BYTES_MAX + 1)) == "frame_too_large"
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
    assert raw.refusal(b"x" * (180 << 10)) == "frame_too_large"


@pytest.mark.parametrize("protocol", [(2, 9), (0, 0), (5, 1)])
def test_versions_that_do_not_meet(raw: RawAttach, protocol: tuple[int, int]) -> None:
    message = encode(attach.AttachMember(*protocol, "e", "w", 7, 0, 0))
    assert raw.refusal(message) == "protocol_mismatch"


def test_an_attached_connection_is_nobody_elses(kvd: LiveKvd, raw: RawAttach) -> None:
    assert isinstance(raw.ask(member_message()), attach.Attached)
    for message in (
        member_message(),
        member_message("other"),
        encode(attach.MapMember("e", "w", 7)),
        encode(attach.MapRegion("no-region")),
        encode(attach.AttachReader(1, 1, b"b" * 16, b"n", b"t" * 16)),
    ):
        assert raw.refusal(message) in ("frame_malformed", "region_unknown")
    assert kvd.sessions()["member"] == 1


def test_connections_that_say_nothing_make_room_for_others(kvd: LiveKvd) -> None:
    silent = [RawAttach(kvd.runtime_dir) for _ in range(200)]
    assert all(connection.closed() for connection in silent[:100])
    assert isinstance(silent[-1].ask(member_message()), attach.Attached)
    for connection in silent:
        connection.close()


# Descriptors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [9, 64, 253])
def test_too_many_descriptors(raw: RawAttach, pidfd: int, count: int) -> None:
    assert raw.refusal(member_message(), [pidfd] * count) == "frame_malformed"


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_descriptors_that_nobody_asked_for_are_closed(raw: RawAttach, count: int) -> None:
    with memfd(4096) as made:
        assert isinstance(raw.ask(member_message(), [made] * count), attach.Attached)


def _regular(stack: ExitStack) -> int:
    return stack.enter_context(tempfile.TemporaryFile(buffering=0)).fileno()


def _in_shm(stack: ExitStack) -> int:
    return stack.enter_context(tempfile.TemporaryFile(dir="/dev/shm", buffering=0)).fileno()


def _device(name: str) -> Callable[[ExitStack], int]:
    def make(stack: ExitStack) -> int:
        made = os.open(name, os.O_RDWR)
        stack.callback(os.close, made)
        return made

    return make


def _pipe(stack: ExitStack) -> int:
    reading, writing = os.pipe()
    stack.callback(os.close, reading)
    stack.callback(os.close, writing)
    return reading


def _socket(stack: ExitStack) -> int:
    return stack.enter_context(socket.socket(socket.AF_UNIX)).fileno()


def _memfd_with(seals: int) -> Callable[[ExitStack], int]:
    def make(stack: ExitStack) -> int:
        made = stack.enter_context(memfd(DEVICE))
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
        return made

    return make


def _read_only(stack: ExitStack) -> int:
    made = os.open(f"/proc/self/fd/{stack.enter_context(memfd(DEVICE))}", os.O_RDONLY)
    stack.callback(os.close, made)
    return made


@pytest.mark.parametrize(
    "make",
    [
        _regular,
        _in_shm,
        _device("/dev/zero"),
        _device("/dev/null"),
        _pipe,
        _socket,
        _read_only,
        _memfd_with(fcntl.F_SEAL_WRITE),
        _memfd_with(fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK),
        _memfd_with(0x10 | fcntl.F_SEAL_SHRINK),
        lambda stack: stack.enter_context(memfd(DEVICE, 0)),
        lambda stack: stack.enter_context(own_pidfd()),
    ],
    ids=["file", "shm", "zero", "null", "pipe", "socket", "read-only", "write-sealed",
         "write-and-shrink-sealed", "future-write-sealed", "sealing-forbidden", "pidfd"],
)  # fmt: skip
def test_device_memory_that_is_none(
    raw: RawAttach, pidfd: int, make: Callable[[ExitStack], int]
) -> None:
    with ExitStack() as stack:
        fd = make(stack)
        message = member_message(num_slots=2, device_bytes=DEVICE)
        assert raw.refusal(message, [pidfd, fd]) == "frame_malformed"


@pytest.mark.parametrize("announced", [DEVICE + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_device_memory_smaller_than_announced(raw: RawAttach, pidfd: int, announced: int) -> None:
    with memfd(DEVICE) as fd:
        message = member_message(num_slots=2, device_bytes=announced)
        assert raw.refusal(message, [pidfd, fd]) == "frame_malformed"


@pytest.mark.parametrize("fds", [0, 1])
def test_device_memory_that_did_not_come(raw: RawAttach, fds: int) -> None:
    """With the kernel's pidfd, what comes alone is taken for the memory."""
    with own_pidfd() as made:
        message = member_message(device_bytes=DEVICE)
        assert raw.refusal(message, [made][:fds]) == "frame_malformed"


def test_device_memory_cannot_be_cut_short_under_kvd(kvd: LiveKvd) -> None:
    """kvd would die of reading what is not there any more."""
    with memfd(DEVICE) as fd, RawMember(kvd.runtime_dir, "e", num_slots=1, device_fd=fd) as client:
        for size in (0, 4096, DEVICE - 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        os.ftruncate(fd, 2 * DEVICE)
        assert client.attached.gate_bytes


def test_the_gate_page_can_only_be_read(raw: RawAttach) -> None:
    reply = raw.ask(member_message(num_slots=2))
    assert isinstance(reply, attach.Attached)
    page = raw.fds[0]
    with pytest.raises(OSError):
        Mapping(page, reply.gate_bytes, writable=True)
    for call in (lambda: os.ftruncate(page, 0), lambda: os.pwrite(page, b"\1" * 8, 64)):
        with pytest.raises(PermissionError):
            call()
    with pytest.raises(PermissionError):
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    pool = raw.fds[2]
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(pool, size)


# Regions ------------------------------------------------------------------------------------------


def test_only_the_engines_own_regions_are_handed_out(kvd: LiveKvd) -> None:
    with RawMember(kvd.runtime_dir, "e") as mine, RawMember(kvd.runtime_dir, "f") as theirs:
        mine.hello(None)
        theirs.hello(None)
        mine.call(msg.RegionCreate(*mine.head(), "g", 1, 8, 4, 16))
        for client, name, code in ((theirs, "g", ""), (mine, "h", ""), (mine, "g", "mapped")):
            client.socket.send(encode(attach.MapRegion(name)))
            data, fds, _, _ = socket.recv_fds(client.socket, 1 << 16, 8)
            kind = {"": b"refused", "mapped": b"mapped"}[code]
            assert kind in data
            assert len(fds) == (code == "mapped")
            for fd in fds:
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, 0)
                os.close(fd)


def test_names_of_files_are_no_regions(raw: RawAttach, tmp_path: Path) -> None:
    raw.ask(member_message())
    os.mkfifo(tmp_path / "fifo")
    for name in ("../../etc/passwd", str(tmp_path / "fifo"), "/dev/zero", "pool", "pool-meta"):
        assert raw.refusal(pack(["map_region", name])) in ("frame_malformed", "region_unknown")
