"""The runtime directory: one daemon's sockets and its lock.

Theory of operation. Whoever holds the flock on `kvd.lock` owns the directory. The kernel drops the
lock when the process dies, however it dies, so a lock is never stale; the file itself is never
removed, since a second daemon could otherwise lock the old inode while a third locks the new one.
Sockets that a dead daemon left are removed under the lock only. Everything is addressed relative to
one directory fd and without following links, so that nobody can swap the directory or a name in it
between a check and its use.

The holder (`hold.sock`) is a process of its own that outlives the daemon: its live socket stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvd.core.errors import LocalError
from kvd.wire.protocol import ADMIN_SOCKET, ATTACH_SOCKET, ENGINE_SOCKET, HOLD_SOCKET
from kvd.wire.runtime_dir import SOCKET_PATH_BYTES_MAX, RuntimeDirError, find_runtime_dir

LOCK_FILE: Final = "kvd.lock"

_OWN_SOCKETS: Final = (ATTACH_SOCKET, ENGINE_SOCKET, ADMIN_SOCKET)
_LOCK_ATTEMPTS: Final = 16


def resolve_runtime_dir(configured: str, env: Mapping[str, str], uid: int) -> Path:
    """Return the runtime directory by the one rule that daemon and clients share.

    Args and rule: see `kvd.wire.runtime_dir.find_runtime_dir`.
    Raises: LocalError(runtime_dir_unusable): relative path, or no rule applies.
    """
    try:
        return find_runtime_dir(configured, env, uid)
    except RuntimeDirError as error:
        raise _unusable(error.path, error.detail) from error


@dataclass(slots=True)
class RuntimeDir:
    """A runtime directory that this process holds the lock of; made by `acquire`."""

    path: Path
    _dir_fd: int
    _lock_fd: int
    removed: tuple[str, ...] = field(default=())
    """Names of stale sockets that were removed at acquire."""

    @classmethod
    def acquire(cls, path: Path, *, others_may_enter: bool = False) -> RuntimeDir:
        """Create the directory when absent, check it, lock it and remove stale sockets.

        Args:
            path: absolute; its parent exists.
            others_may_enter: other users may attach (server.allowed_uids): mode 0711, not 0700.

        Raises:
            LocalError(runtime_dir_unusable): path too long, a link or no directory, owned by
                somebody else, open to others, or something else sits where a socket belongs.
            LocalError(already_running): another daemon holds the lock, or listens there.
        Leaves: on an error no fd open and nothing removed but stale sockets.
        """
        _check_lengths(path)
        with ExitStack() as undo:
            dir_fd = _open_directory(path, 0o711 if others_may_enter else 0o700)
            undo.callback(os.close, dir_fd)
            lock_fd = _take_lock(dir_fd, path)
            undo.callback(os.close, lock_fd)
            removed = _remove_stale_sockets(dir_fd, path)
            undo.pop_all()
        return cls(path, dir_fd, lock_fd, removed)

    @property
    def attach_socket(self) -> Path:
        """Where processes attach (SEQPACKET)."""
        return self.path / ATTACH_SOCKET

    @property
    def engine_socket(self) -> Path:
        """Where engines send control messages (ZeroMQ)."""
        return self.path / ENGINE_SOCKET

    @property
    def admin_socket(self) -> Path:
        """Where the admin API listens (HTTP)."""
        return self.path / ADMIN_SOCKET

    @property
    def hold_socket(self) -> Path:
        """Where the holder of memory listens."""
        return self.path / HOLD_SOCKET

    def release(self) -> None:
        """Remove the daemon's sockets, then drop the lock; the lock file stays. Idempotent."""
        if self._lock_fd < 0:
            return
        for name in _OWN_SOCKETS:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._dir_fd)
        os.ftruncate(self._lock_fd, 0)  # a pid in a lock that nobody holds would mislead
        os.close(self._lock_fd)
        os.close(self._dir_fd)
        self._lock_fd = self._dir_fd = -1


def _unusable(path: Path, detail: str) -> LocalError:
    return LocalError("runtime_dir_unusable", path=path, detail=detail)


def ensure_directory(path: Path, *, others_may_enter: bool = False) -> None:
    """Create the directory when absent and check it, without taking its lock.

    Args and errors: as `RuntimeDir.acquire`.
    """
    _check_lengths(path)
    os.close(_open_directory(path, 0o711 if others_may_enter else 0o700))


def _check_lengths(path: Path) -> None:
    if not path.is_absolute():
        raise _unusable(path, "the path is relative")
    longest = max((*_OWN_SOCKETS, HOLD_SOCKET), key=len)
    length = len(os.fsencode(path / longest))
    if length > SOCKET_PATH_BYTES_MAX:
        raise _unusable(
            path,
            f"the socket {longest} in it would have a path of {length} bytes, "
            f"over the {SOCKET_PATH_BYTES_MAX} that the system allows: choose a shorter one",
        )


def _open_directory(path: Path, mode: int) -> int:
    """Create and check the directory; returns its fd, which the caller closes."""
    try:
        os.mkdir(path, mode)
        created = True
    except FileExistsError:
        created = False
    except OSError as error:
        raise _unusable(path, f"it cannot be created ({error.strerror})") from error
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        dir_fd = os.open(path, flags)
    except OSError as error:
        raise _unusable(path, _why_not_opened(path, error)) from error
    with ExitStack() as undo:
        undo.callback(os.close, dir_fd)
        if created:
            os.fchmod(dir_fd, mode)  # whatever the umask took away
        _check_directory(path, dir_fd, mode)
        undo.pop_all()
    return dir_fd


def _why_not_opened(path: Path, error: OSError) -> str:
    if path.is_symlink():
        return "it is a symbolic link"
    if error.errno == errno.ENOTDIR:
        return "it is not a directory: remove it, or choose another path"
    return f"it cannot be opened ({error.strerror})"


def _check_directory(path: Path, dir_fd: int, mode: int) -> None:
    status = os.fstat(dir_fd)
    if status.st_uid != os.geteuid():
        raise _unusable(path, f"it belongs to uid {status.st_uid}, kvd runs as {os.geteuid()}")
    actual = stat.S_IMODE(status.st_mode)
    cure = f"chmod {mode:04o} {path}"
    if not _is_for_kvd(dir_fd, actual):
        cure = f"it serves others, too, so use one of kvd's own, e.g. {path / 'kvd'}"
    if actual & 0o077 & ~mode:
        raise _unusable(path, f"its mode {actual:04o} opens it to others: {cure}")
    if mode & 0o011 and actual & 0o011 != 0o011:
        what = f"its mode {actual:04o} keeps out the users of server.allowed_uids"
        raise _unusable(path, f"{what}: {cure}")
    parent = path.parent.stat()
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        raise _unusable(path, f"anybody could replace it: {path.parent} is writable by all")


def _is_for_kvd(dir_fd: int, mode: int) -> bool:
    """Whether a directory is kvd's, or nobody's yet: others of it would suffer from its mode."""
    if mode & stat.S_ISVTX:
        return False
    names = os.listdir(dir_fd)
    return not names or LOCK_FILE in names or HOLD_SOCKET in names


def _take_lock(dir_fd: int, path: Path) -> int:
    """Lock `kvd.lock` and write this pid into it; returns its fd, which the caller closes."""
    for _ in range(_LOCK_ATTEMPTS):
        with ExitStack() as undo:
            lock_fd = _open_lock(dir_fd, path)
            undo.callback(os.close, lock_fd)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                pid = _read_pid(lock_fd)
                raise LocalError(
                    "already_running", who="kvd", pid=pid, path=path / LOCK_FILE
                ) from error
            # Somebody may have removed the file between open and lock: then lock the new one.
            if _is_current(lock_fd, dir_fd):
                os.ftruncate(lock_fd, 0)
                os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
                undo.pop_all()
                return lock_fd
    raise _unusable(path, f"{LOCK_FILE} is removed again and again")


def _open_lock(dir_fd: int, path: Path) -> int:
    # O_NONBLOCK: opening a FIFO that somebody planted must not wait for its other end.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock_fd = os.open(LOCK_FILE, flags, 0o600, dir_fd=dir_fd)
    except OSError as error:
        detail = "a symbolic link" if error.errno == errno.ELOOP else f"unusable ({error.strerror})"
        raise _unusable(path, f"{LOCK_FILE} in it is {detail}") from error
    status = os.fstat(lock_fd)
    # A second name could be a file of ours elsewhere, which writing the pid would destroy.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid != os.geteuid():
        os.close(lock_fd)
        raise _unusable(path, f"{LOCK_FILE} in it is not a plain file of kvd's own")
    return lock_fd


def _is_current(lock_fd: int, dir_fd: int) -> bool:
    try:
        named = os.stat(LOCK_FILE, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(lock_fd))


def _read_pid(lock_fd: int) -> str:
    text = os.pread(lock_fd, 32, 0).decode("ascii", "replace").strip()
    return text if text.isdecimal() else "unknown"


def _remove_stale_sockets(dir_fd: int, path: Path) -> tuple[str, ...]:
    """Remove sockets that nobody listens on; everything is looked at before one is removed."""
    stale = []
    for name in (*_OWN_SOCKETS, HOLD_SOCKET):
        try:
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not stat.S_ISSOCK(status.st_mode):
            raise _unusable(path, f"{name} in it is not a socket: remove it")
        pid = listener_pid(path / name)
        if pid is None:
            stale.append(name)
        elif name != HOLD_SOCKET:
            # Possible only when the lock file of a running daemon was removed.
            raise LocalError("already_running", who="kvd", pid=pid, path=path / name)
    for name in stale:
        os.unlink(name, dir_fd=dir_fd)
    return tuple(stale)


def listener_pid(path: Path, kind: int = socket.SOCK_STREAM) -> str | None:
    """Return the pid that listens on a socket ("unknown" when it is not told), None if nobody.

    Args: kind: type of the socket.
    """
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError:
            # EPROTOTYPE: a listener of another type; EAGAIN: its queue is full; EACCES: unknown.
            return "unknown"
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return str(struct.unpack("3i", credentials)[0])
