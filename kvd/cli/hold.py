"""`kvd --hold`: being the holder of a runtime directory."""

from __future__ import annotations

import os
from typing import Final

from kvd.config.model import Config
from kvd.memory.owners.holder import hold
from kvd.memory.runtime import ensure_directory, resolve_runtime_dir
from kvd.wire.protocol import HOLD_SOCKET

_NS: Final = 1_000_000_000


def hold_memory(config: Config, *, once: bool, ready_fd: int) -> None:
    """Keep what the directory's kvd hands over, until told to end.

    Args:
        once: serve one kvd, which started this process: go on in a child of nobody, so that who
            ends or forgets its children does not meet it.
        ready_fd: see `kvd.memory.owners.holder.hold`.

    Raises: LocalError(runtime_dir_unusable | already_running).
    """
    if once and os.fork():
        os._exit(0)
    server = config.server
    path = resolve_runtime_dir(server.runtime_dir, os.environ, os.getuid())
    ensure_directory(path, others_may_enter=bool(server.allowed_uids))
    hold(path / HOLD_SOCKET, config.pool.hold_ttl / _NS, once=once, ready_fd=ready_fd)
