"""Starting the daemon once its configuration is known to be good."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from typing import TYPE_CHECKING

import uvloop

from kvd import __version__
from kvd.config.load import LoadedConfig
from kvd.core.errors import InvariantError
from kvd.memory.runtime import RuntimeDir, resolve_runtime_dir
from kvd.server.admin import AdminServer
from kvd.server.logs import Logs, capture_library_logs

if TYPE_CHECKING:
    from kvd.server.node import Node


def serve(loaded: LoadedConfig) -> int:
    """Run one kvd to its end; returns the exit code.

    Raises: KvdError when it cannot start; nothing is left over then.
    """
    config = loaded.config
    path = resolve_runtime_dir(config.server.runtime_dir, os.environ, os.getuid())
    runtime = RuntimeDir.acquire(path, others_may_enter=bool(config.server.allowed_uids))
    try:
        return _serve_in(loaded, runtime)
    finally:
        runtime.release()


def _serve_in(loaded: LoadedConfig, runtime: RuntimeDir) -> int:
    """Answer probes first; load the rest beside that."""
    _set_oom_score(loaded.config.server.oom_score_adj)
    logs = Logs(loaded.config.server.log_level, loaded.config.server.log_format)

    async def main() -> None:
        admin = AdminServer(None, runtime.admin_socket, __version__)
        await admin.start()
        loop = asyncio.get_running_loop()
        app = await loop.run_in_executor(None, importlib.import_module, "kvd.server.app")
        node = await loop.run_in_executor(None, _make_node, loaded, logs)
        await app.Daemon(node, runtime, admin).run()

    undo = capture_library_logs(logs)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except InvariantError as error:
        print(f"kvd: it contradicts itself and stops: {error}", file=sys.stderr)
        return 70
    finally:
        undo()
        logs.close()
    return 0


def _make_node(loaded: LoadedConfig, logs: Logs) -> Node:
    from kvd.server.node import Node

    return Node(loaded, logs)


def _set_oom_score(score: int | None) -> None:
    if score is None:
        return
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except OSError as error:
        print(f"kvd: server.oom_score_adj = {score} was not applied: {error}", file=sys.stderr)
