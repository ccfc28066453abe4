"""Starting the daemon once its configuration is known to be good."""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop

from kvd.config.load import LoadedConfig
from kvd.core.errors import InvariantError
from kvd.memory.runtime import RuntimeDir, resolve_runtime_dir


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
    from kvd.server.app import Daemon
    from kvd.server.logs import Logs
    from kvd.server.node import Node

    _set_oom_score(loaded.config.server.oom_score_adj)
    logs = Logs(loaded.config.server.log_level, loaded.config.server.log_format)
    node = Node(loaded, logs)

    async def main() -> None:
        await Daemon(node, runtime).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except InvariantError as error:
        print(f"kvd: it contradicts itself and stops: {error}", file=sys.stderr)
        return 70
    finally:
        logs.close()
    return 0


def _set_oom_score(score: int | None) -> None:
    if score is None:
        return
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except OSError as error:
        print(f"kvd: server.oom_score_adj = {score} was not applied: {error}", file=sys.stderr)
