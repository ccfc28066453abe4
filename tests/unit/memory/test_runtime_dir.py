"""The runtime directory: traps are refused, one daemon owns it, nothing stays behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvd.core.errors import CATALOGUE, LocalError
from kvd.memory.runtime import LOCK_FILE, RuntimeDir, resolve_runtime_dir

ROOT = Path(__file__).parents[3]
OWN = ("attach.sock", "engine.sock", "admin.sock")


def open_fds() -> set[str]:
    """Return the open file descriptors of this process, by what they point to."""
    links = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            links.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the fd of the listing itself
    return links


def refusal(path: Path, *, others_may_enter: bool = False) -> str:
    """Acquire, which must fail and leave no fd open; return the sentence."""
    before = open_fds()
    with pytest.raises(LocalError) as caught:
        RuntimeDir.acquire(path, others_may_enter=others_may_enter)
    assert open_fds() == before
    assert caught.value.code == "runtime_dir_unusable"
    assert str(path) in caught.value.what
    return caught.value.what


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Give a directory for a runtime directory; the paths of sockets in it stay short."""
    short = Path("/tmp") / f"kvd-{os.getpid()}-{tmp_path.name[-24:]}"
    short.mkdir(mode=0o700)
    yield short / "kvd"
    for child in sorted(short.rglob("*"), reverse=True):
        child.rmdir() if child.is_dir() and not child.is_symlink() else child.unlink()
    short.rmdir()


def bind(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Listen on a socket; closing it leaves a stale file."""
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(os.fspath(path))
    listener.listen(1)
    return listener


@pytest.mark.parametrize("length", [96, 97, 200])
def test_path_too_long_for_its_sockets(length: int, tmp_path: Path) -> None:
    path = Path("/tmp") / ("x" * (length - len("/tmp/")))
    what = refusal(path)
    assert f"attach.sock in it would have a path of {length + 12} bytes, over the 107" in what
    assert "choose a shorter one" in what
    assert not path.exists()


def test_path_of_the_longest_length_passes_the_check(run: Path) -> None:
    path = run.parent / ("x" * (95 - len(os.fspath(run.parent)) - 1))
    runtime = RuntimeDir.acquire(path)
    assert len(os.fspath(runtime.attach_socket)) == 107
    with closing(bind(runtime.attach_socket)):
        runtime.release()


def test_length_is_counted_in_bytes_not_in_letters() -> None:
    assert "over the 107" in refusal(Path("/tmp") / ("ü" * 60))


def test_relative_path() -> None:
    assert "relative" in refusal(Path("run/kvd"))


def test_parent_is_missing(run: Path) -> None:
    assert "it cannot be created (No such file or directory)" in refusal(run / "a")


def test_symbolic_link(run: Path) -> None:
    (run.parent / "target").mkdir(mode=0o700)
    run.symlink_to(run.parent / "target")
    assert "it is a symbolic link" in refusal(run)
    assert list((run.parent / "target").iterdir()) == []


def test_dangling_symbolic_link(run: Path) -> None:
    run.symlink_to(run.parent / "target")
    assert "it is a symbolic link" in refusal(run)
    assert not (run.parent / "target").exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: Path(path).write_text("x")])
def test_no_directory(make: Callable[[Path], object], run: Path) -> None:
    make(run)
    assert "it is not a directory: remove it, or choose another path" in refusal(run)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
def test_directory_open_to_others(mode: int, run: Path) -> None:
    run.mkdir()
    run.chmod(mode)
    assert f"its mode {mode:04o} opens it to others: chmod 0700 {run}" in refusal(run)
    assert stat.S_IMODE(run.stat().st_mode) == mode
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("mode", [0o722, 0o755])
def test_directory_open_to_others_though_they_may_enter(mode: int, run: Path) -> None:
    run.mkdir()
    run.chmod(mode)
    assert "opens it to others: chmod 0711" in refusal(run, others_may_enter=True)


def test_directory_that_keeps_out_allowed_users(run: Path) -> None:
    run.mkdir(mode=0o700)
    what = refusal(run, others_may_enter=True)
    assert "keeps out the users of server.allowed_uids: chmod 0711" in what


@pytest.mark.parametrize("others_may_enter", [False, True])
def test_a_shared_directory_is_not_to_be_changed(run: Path, others_may_enter: bool) -> None:
    """/tmp and the like: sticky, or with things of others in it."""
    run.mkdir()
    run.chmod(0o1777)
    what = refusal(run, others_may_enter=others_may_enter)
    assert what.endswith(f"so use one of kvd's own, e.g. {run}/kvd.")
    run.chmod(0o755)
    assert "opens it to others: chmod 0700" in refusal(run)
    (run / "of others").touch()
    what = refusal(run, others_may_enter=others_may_enter)
    assert ("chmod" in what, "kvd's own" in what) == (False, True)
    (run / LOCK_FILE).touch()
    assert "opens it to others: chmod 0700" in refusal(run)


def test_the_remedy_fits_whatever_is_wrong_with_a_directory() -> None:
    row = CATALOGUE["runtime_dir_unusable"]
    assert "mode" not in row.remedy
    assert "--runtime-dir" in row.remedy


def test_directory_of_somebody_else(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"it belongs to uid {owner}, kvd runs as {owner + 1}" in refusal(run)


def test_parent_that_lets_anybody_replace_it(run: Path) -> None:
    run.parent.chmod(0o777)
    assert "anybody could replace it" in refusal(run)
    run.parent.chmod(0o1777)
    RuntimeDir.acquire(run).release()


@pytest.mark.parametrize("kind", ["link", "fifo", "hard link", "directory"])
def test_lock_file_that_is_a_trap(kind: str, run: Path) -> None:
    run.mkdir(mode=0o700)
    victim = run.parent / "victim"
    victim.write_text("precious")
    lock = run / LOCK_FILE
    if kind == "link":
        lock.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(lock)
    elif kind == "hard link":
        os.link(victim, lock)
    else:
        lock.mkdir()
    assert f"{LOCK_FILE} in it is " in refusal(run)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", [*OWN, "hold.sock"])
@pytest.mark.parametrize("kind", ["link", "fifo", "file", "directory"])
def test_something_else_where_a_socket_belongs(name: str, kind: str, run: Path) -> None:
    run.mkdir(mode=0o700)
    stale = run / ("engine.sock" if name != "engine.sock" else "attach.sock")
    bind(stale).close()
    place = run / name
    if kind == "link":
        place.symlink_to(stale)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "file":
        place.write_text("x")
    else:
        place.mkdir()
    assert f"{name} in it is not a socket: remove it" in refusal(run)
    assert stale.is_socket()
    assert place.is_symlink() or place.exists()


def test_second_daemon_learns_the_pid_of_the_first(run: Path) -> None:
    first = RuntimeDir.acquire(run)
    with closing(bind(first.attach_socket)):
        with pytest.raises(LocalError) as caught:
            RuntimeDir.acquire(run)
        assert caught.value.code == "already_running"
        told = {"who": "kvd", "pid": str(os.getpid()), "path": f"{run}/kvd.lock"}
        assert caught.value.context == told
        assert first.attach_socket.is_socket()
        first.release()
    RuntimeDir.acquire(run).release()


def test_lock_without_a_readable_pid_is_still_a_lock(run: Path) -> None:
    first = RuntimeDir.acquire(run)
    (run / LOCK_FILE).write_text("garbage\n")
    with pytest.raises(LocalError, match=r"another kvd \(pid unknown\)"):
        RuntimeDir.acquire(run)
    first.release()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_daemon_whose_lock_file_was_removed_keeps_its_sockets(
    kind: socket.SocketKind, run: Path
) -> None:
    first = RuntimeDir.acquire(run)
    with closing(bind(first.attach_socket, kind)):
        (run / LOCK_FILE).unlink()
        before = open_fds()
        with pytest.raises(LocalError) as caught:
            RuntimeDir.acquire(run)
        assert caught.value.code == "already_running"
        assert caught.value.context["path"] == f"{run}/attach.sock"
        assert open_fds() == before
        assert first.attach_socket.is_socket()
        first.release()


def test_killed_daemon_leaves_nothing_that_blocks_the_next(run: Path) -> None:
    code = (
        "import os, socket, sys; from pathlib import Path; "
        "from kvd.memory.runtime import RuntimeDir; r = RuntimeDir.acquire(Path(sys.argv[1])); "
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        "s.bind(os.fspath(r.attach_socket)); s.listen(); print('ready', flush=True); "
        "sys.stdin.read()"
    )
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(run)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as daemon:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == b"ready\n"
            with pytest.raises(LocalError) as caught:
                RuntimeDir.acquire(run)
            assert caught.value.context["pid"] == str(daemon.pid)
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        assert (run / "attach.sock").is_socket()
    runtime = RuntimeDir.acquire(run)
    assert runtime.removed == ("attach.sock",)
    assert [child.name for child in run.iterdir()] == [LOCK_FILE]
    runtime.release()


def test_stale_sockets_go_and_a_live_holder_stays(run: Path) -> None:
    run.mkdir(mode=0o700)
    for name in OWN:
        bind(run / name).close()
    with closing(bind(run / "hold.sock", socket.SOCK_SEQPACKET)):
        runtime = RuntimeDir.acquire(run)
        assert runtime.removed == OWN
        runtime.release()
        assert sorted(child.name for child in run.iterdir()) == ["hold.sock", LOCK_FILE]
    runtime = RuntimeDir.acquire(run)
    assert runtime.removed == ("hold.sock",)
    runtime.release()


def test_fresh_directory_is_private_whatever_the_umask(run: Path) -> None:
    old = os.umask(0o177)
    try:
        runtime = RuntimeDir.acquire(run)
    finally:
        os.umask(old)
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert stat.S_IMODE((run / LOCK_FILE).stat().st_mode) == 0o600
    assert (run / LOCK_FILE).read_text() == f"{os.getpid()}\n"
    runtime.release()
    shared = run.parent / "shared"
    RuntimeDir.acquire(shared, others_may_enter=True).release()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o711


def test_release_removes_sockets_keeps_the_lock_file_and_may_repeat(run: Path) -> None:
    before = open_fds()
    runtime = RuntimeDir.acquire(run)
    inode = (run / LOCK_FILE).stat().st_ino
    for name in OWN:
        bind(run / name).close()
    runtime.release()
    runtime.release()
    assert [child.name for child in run.iterdir()] == [LOCK_FILE]
    assert (run / LOCK_FILE).read_text() == ""
    assert open_fds() == before
    RuntimeDir.acquire(run).release()
    assert (run / LOCK_FILE).stat().st_ino == inode


def test_release_after_the_directory_was_removed(run: Path) -> None:
    runtime = RuntimeDir.acquire(run)
    (run / LOCK_FILE).unlink()
    run.rmdir()
    runtime.release()


@pytest.mark.parametrize(
    ("configured", "env", "uid", "detail"),
    [
        ("run", {}, 0, "--runtime-dir or server.runtime_dir gives a relative path"),
        ("", {"KVD_RUNTIME_DIR": "run"}, 0, "KVD_RUNTIME_DIR gives a relative path"),
        ("", {"RUNTIME_DIRECTORY": "a:/b"}, 0, "RUNTIME_DIRECTORY gives a relative path"),
        ("", {"XDG_RUNTIME_DIR": "run"}, 1000, "XDG_RUNTIME_DIR gives a relative path"),
        ("", {}, 1000, "XDG_RUNTIME_DIR is not set"),
    ],
)
def test_rule_refuses(configured: str, env: dict[str, str], uid: int, detail: str) -> None:
    with pytest.raises(LocalError) as caught:
        resolve_runtime_dir(configured, env, uid)
    assert caught.value.code == "runtime_dir_unusable"
    assert detail in caught.value.what


def test_rule_takes_the_strongest_that_is_set() -> None:
    env = {
        "KVD_RUNTIME_DIR": "/run/variable",
        "RUNTIME_DIRECTORY": "/run/systemd:/run/second",
        "XDG_RUNTIME_DIR": "/run/user/0",
    }
    assert resolve_runtime_dir("/run/flag", env, 0) == Path("/run/flag")
    assert resolve_runtime_dir("", env, 0) == Path("/run/variable")
    env["KVD_RUNTIME_DIR"] = ""
    assert resolve_runtime_dir("", env, 0) == Path("/run/systemd")
    del env["RUNTIME_DIRECTORY"]
    assert resolve_runtime_dir("", env, 0) == Path("/run/kvd")
    assert resolve_runtime_dir("", env, 1000) == Path("/run/user/0/kvd")
