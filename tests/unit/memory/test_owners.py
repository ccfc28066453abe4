"""Owners of memory: what they keep, what they give back, and what they refuse."""

from __future__ import annotations

import array
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvd.core.errors import LocalError
from kvd.core.ids import MemberRef
from kvd.memory.owners import hold_wire as wire
from kvd.memory.owners.base import NoOwner, check_name, close_all, kept_member, kept_region
from kvd.memory.owners.choose import choose_owner
from kvd.memory.owners.fdstore import FdStore
from kvd.memory.owners.hold_client import HolderOwner
from kvd.wire.protocol import HOLD_SOCKET


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as name:
        yield Path(name)


@pytest.fixture
def holder(directory: Path) -> Iterator[HolderOwner]:
    """A connection to a holder of its own, which ends with the test."""
    owner = HolderOwner.start(directory / HOLD_SOCKET, 60.0)
    with closing(owner):
        yield owner
        owner.release()


def memory(content: bytes) -> int:
    """A memfd with this content."""
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def contents(fds: dict[str, int]) -> dict[str, bytes]:
    """What is in them; they are closed."""
    found = {name: os.pread(fd, 100, 0) for name, fd in fds.items()}
    close_all(fds)
    return found


def keep(owner: HolderOwner, name: str, content: bytes) -> None:
    """Keep memory, and forget it here."""
    fd = memory(content)
    owner.keep(name, fd)
    os.close(fd)


# The holder ---------------------------------------------------------------------------------------


def test_it_gives_back_what_it_was_given(directory: Path, holder: HolderOwner) -> None:
    assert holder.take() == {}
    keep(holder, "pool", b"one")
    keep(holder, "meta", b"two")
    keep(holder, "pool", b"three")
    keep(holder, "gone", b"four")
    holder.drop("gone")
    holder.drop("never there")
    holder.confirm()
    assert contents(holder.take()) == {"pool": b"three", "meta": b"two"}
    holder.close()
    again = HolderOwner.connect(directory / HOLD_SOCKET, 60.0)
    assert again is not None
    with closing(again):
        assert contents(again.take()) == {"pool": b"three", "meta": b"two"}
        assert again.survives == ("engine", "daemon")
        again.release()


def test_the_next_daemon_says_how_long_it_may_be_away(directory: Path) -> None:
    first = HolderOwner.start(directory / HOLD_SOCKET, 60.0)
    close_all(first.take())
    first.close()
    again = HolderOwner.connect(directory / HOLD_SOCKET, 0.05)
    assert again is not None
    close_all(again.take())
    again.close()
    end = time.monotonic() + 20
    while (directory / HOLD_SOCKET).exists():
        assert time.monotonic() < end


def test_only_one_daemon_is_served(directory: Path, holder: HolderOwner) -> None:
    holder.confirm()
    other = HolderOwner.connect(directory / HOLD_SOCKET, 60.0)
    assert other is not None
    with closing(other), pytest.raises(LocalError, match="another kvd is connected"):
        other.confirm()
    holder.confirm()


def test_whoever_says_nothing_gives_way(directory: Path) -> None:
    silent = HolderOwner.start(directory / HOLD_SOCKET, 60.0)
    other = HolderOwner.connect(directory / HOLD_SOCKET, 60.0)
    assert other is not None
    with closing(silent), closing(other):
        other.confirm()
        with pytest.raises(LocalError, match="owner_unavailable"):
            silent.confirm()
        other.release()


@pytest.mark.parametrize(
    "data", [b"Z", b"K", b"Kpool", b"K../x", b"\xff\xfe", b"K" + b"n" * 600, b"D" * 600]
)
def test_nonsense_ends_the_connection_and_harms_nobody(
    directory: Path, holder: HolderOwner, data: bytes
) -> None:
    keep(holder, "pool", b"kept")
    holder.confirm()
    holder.close()
    stranger = HolderOwner.connect(directory / HOLD_SOCKET, 60.0)
    assert stranger is not None
    with closing(stranger):
        with suppress(OSError):
            stranger._sock.send(data)
        with pytest.raises(LocalError):
            stranger.confirm()
    again = HolderOwner.connect(directory / HOLD_SOCKET, 60.0)
    assert again is not None
    with closing(again):
        assert contents(again.take()) == {"pool": b"kept"}
        again.release()


def test_a_second_holder_is_refused(directory: Path, holder: HolderOwner) -> None:
    path = directory / HOLD_SOCKET
    holder.confirm()
    credentials = holder._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = struct.unpack("3i", credentials)[0]
    command = [sys.executable, "-m", "kvd", "--hold", "--runtime-dir", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"kvd: already_running: another holder (pid {pid}) holds {path}. Stop that process"
    )
    holder.confirm()


def test_asked_to_end_it_leaves_nothing(directory: Path) -> None:
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "kvd", "--hold", "--runtime-dir", str(directory)]
    command += ["--hold-ready-fd", str(write_end)]
    with subprocess.Popen(command, pass_fds=(write_end,)) as process:
        os.close(write_end)
        assert os.read(read_end, 1) == b"1"
        os.close(read_end)
        owner = HolderOwner.connect(directory / HOLD_SOCKET, 60.0)
        assert owner is not None
        with closing(owner):
            close_all(owner.take())
            assert owner.survives == ("engine", "daemon", "stop")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert os.listdir(directory) == []


def test_a_holder_that_does_not_answer_is_an_error_in_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.memory.owners.hold_client.ANSWER_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / HOLD_SOCKET))
        listener.listen()
        owner = HolderOwner.connect(directory / HOLD_SOCKET, 60.0)
        assert owner is not None
        with closing(owner), pytest.raises(LocalError, match="owner_unavailable"):
            owner.take()


def test_no_holder_runs(directory: Path) -> None:
    assert HolderOwner.connect(directory / HOLD_SOCKET, 60.0) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / HOLD_SOCKET))
    assert HolderOwner.connect(directory / HOLD_SOCKET, 60.0) is None, "its socket is stale"


# systemd's store ----------------------------------------------------------------------------------


class Manager:
    """The service manager's end of NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(5)

    def receive(self) -> tuple[str, list[int]]:
        """One message and its descriptors."""
        data, ancillary, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(64))
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload)
        return data.decode(), list(fds)

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


@pytest.fixture
def manager(directory: Path) -> Iterator[Manager]:
    with closing(Manager(directory / "notify")) as made:
        yield made


def test_the_store_is_told_in_its_own_words(manager: Manager) -> None:
    store = FdStore({"NOTIFY_SOCKET": str(manager.path)}, os.getpid())
    fd = memory(b"pool")
    store.keep("pool", fd)
    os.close(fd)
    assert manager.receive() == ("FDSTOREREMOVE=1\nFDNAME=pool", [])
    text, fds = manager.receive()
    assert text == "FDSTORE=1\nFDNAME=pool\nFDPOLL=0"
    assert os.pread(fds[0], 10, 0) == b"pool"
    wire.close_fds(fds)
    store.drop("pool")
    assert manager.receive() == ("FDSTOREREMOVE=1\nFDNAME=pool", [])
    assert store.survives == ("engine", "daemon")


def test_the_barrier_waits_until_it_is_closed(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FdStore({"NOTIFY_SOCKET": str(manager.path)}, os.getpid())
    monkeypatch.setattr("kvd.memory.owners.fdstore.BARRIER_SECONDS", 0.05)
    with pytest.raises(LocalError, match="did not confirm in time"):
        store.confirm()
    text, fds = manager.receive()
    assert text == "BARRIER=1"
    wire.close_fds(fds)


def test_what_came_with_the_start_is_taken_once() -> None:
    env = {
        "NOTIFY_SOCKET": "/nowhere",
        "LISTEN_PID": "77",
        "LISTEN_FDS": "0",
        "LISTEN_FDNAMES": "",
        "FDSTORE": "512",
    }
    store = FdStore(env, 77)
    assert store.take() == {}
    assert env == {"NOTIFY_SOCKET": "/nowhere", "FDSTORE": "512"}
    assert store.survives == ("engine", "daemon", "stop")
    other = {"NOTIFY_SOCKET": "/nowhere", "LISTEN_PID": "76", "LISTEN_FDS": "3"}
    assert FdStore(other, 77).take() == {}, "these were for another process"


def test_without_a_service_manager_there_is_no_store() -> None:
    with pytest.raises(LocalError, match="no NOTIFY_SOCKET"):
        FdStore({}, 1)


# Choosing -----------------------------------------------------------------------------------------


def test_the_choice_follows_what_is_there(directory: Path, manager: Manager) -> None:
    path = directory / HOLD_SOCKET
    service = {"NOTIFY_SOCKET": str(manager.path)}
    assert isinstance(choose_owner("none", path, 1, dict(service)), NoOwner)
    assert choose_owner("fdstore", path, 1, dict(service)).name == "fdstore"
    assert choose_owner("auto", path, 1, dict(service)).name == "fdstore"
    with pytest.raises(LocalError, match=r"kvd-hold\.service"):
        choose_owner("holder", path, 1, dict(service))
    with closing(HolderOwner.start(path, 60)) as running:
        running.confirm()
        with closing(choose_owner("auto", path, 1, dict(service))) as found:
            assert found.name == "holder", "it survives a stop, an old store does not"
        new = {**service, "FDSTORE": "1"}
        assert choose_owner("auto", path, 1, new).name == "fdstore"
        running.release()


def test_names_are_told_apart_and_fit() -> None:
    refs = [MemberRef("a/b", "c", 1), MemberRef("a", "b/c", 2), MemberRef("a", "b/c", 3)]
    names = {kept_member(ref) for ref in refs} | {kept_region(n) for n in ("x", "y", "x:/ü")}
    assert len(names) == 6
    assert all(check_name(name) == name for name in names)
    for bad in ("", "a b", "a:b", "x" * 201, "ü"):
        with pytest.raises(ValueError, match="must have 1 to"):
            check_name(bad)
