"""Where the sockets of a kvd are: one rule that daemon, engines and tools share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

RUNTIME_DIR_VARIABLE: Final = "KVD_RUNTIME_DIR"

SOCKET_PATH_BYTES_MAX: Final = 107
"""Longest path of a UNIX socket: sun_path has 108 bytes, one of them ends it."""


class RuntimeDirError(ValueError):
    """No runtime directory can be named: the path that was tried, and why it cannot be used."""

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(f"runtime directory {path} cannot be used: {detail}")
        self.path = path
        self.detail = detail


def find_runtime_dir(configured: str, env: Mapping[str, str], uid: int) -> Path:
    """Return the runtime directory; whether it exists is not looked at.

    Args:
        configured: from `--runtime-dir` or server.runtime_dir; empty when not set.
        env: environment: KVD_RUNTIME_DIR, then RUNTIME_DIRECTORY (systemd; the first of a list),
            then /run/kvd for root, then $XDG_RUNTIME_DIR/kvd.
        uid: effective user id.

    Raises: RuntimeDirError: relative path, or no rule applies.
    """
    systemd = env.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    xdg = env.get("XDG_RUNTIME_DIR", "")
    for name, text in (
        ("--runtime-dir or server.runtime_dir", configured),
        (RUNTIME_DIR_VARIABLE, env.get(RUNTIME_DIR_VARIABLE, "")),
        ("RUNTIME_DIRECTORY", systemd),
        ("the rule for root", "/run/kvd" if uid == 0 else ""),
        ("XDG_RUNTIME_DIR", f"{xdg}/kvd" if xdg else ""),
    ):
        if not text:
            continue
        if not text.startswith("/"):
            raise RuntimeDirError(Path(text), f"{name} gives a relative path")
        return Path(text)
    raise RuntimeDirError(Path("$XDG_RUNTIME_DIR/kvd"), "XDG_RUNTIME_DIR is not set")
