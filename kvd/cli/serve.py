"""Starting the daemon once its configuration is known to be good."""

from __future__ import annotations

import asyncio
import importlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import uvloop

from kvd import __version__
from kvd.cli.daemon import EXIT_FORCED, EXIT_INVARIANT
from kvd.config.load import LoadedConfig
from kvd.core.errors import InvariantError, KvdError
from kvd.memory.oom_score import set_oom_score
from kvd.memory.runtime import RuntimeDir, resolve_runtime_dir
from kvd.memory.sd_notify import notify
from kvd.server.admin import AdminServer
from kvd.server.logs import Logs, capture_library_logs
from kvd.server.reloading import Reloader

if TYPE_CHECKING:
    from kvd.server.node import Node

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
OBEYED_SIGNALS: Final = (*STOP_SIGNALS, signal.SIGHUP)


def serve(loaded: LoadedConfig, read: Callable[[], LoadedConfig]) -> int:
    """Run one kvd to its end; returns the exit code.

    Args: read: loads the configuration again, from where `loaded` came; see `Reloader`.
    Raises: KvdError when it cannot start; nothing is left over then.
    """
    # From here on there is something to give back: whoever says stop meanwhile waits for the loop.
    signal.pthread_sigmask(signal.SIG_BLOCK, OBEYED_SIGNALS)
    _raise_file_limit()
    config = loaded.config
    path = resolve_runtime_dir(config.server.runtime_dir, os.environ, os.getuid())
    runtime = RuntimeDir.acquire(path, others_may_enter=bool(config.server.allowed_uids))
    try:
        return _serve_in(loaded, runtime, Reloader(read))
    except KvdError as error:
        notify(f"STATUS=refused to start: {error}")
        raise
    finally:
        runtime.release()


def _serve_in(loaded: LoadedConfig, runtime: RuntimeDir, reloader: Reloader) -> int:
    """Answer probes first; load the rest beside that."""
    score = set_oom_score(loaded.config.server.oom_score_adj)
    logs = Logs(loaded.config.server.log_level, loaded.config.server.log_format)

    async def main() -> None:
        stop = asyncio.Event()
        with _obeyed_signals(stop, reloader):
            admin = AdminServer(None, runtime.admin_socket, __version__)
            await admin.start()
            loop = asyncio.get_running_loop()
            app = await loop.run_in_executor(None, importlib.import_module, "kvd.server.app")
            node = await loop.run_in_executor(None, _make_node, loaded, logs)
            node.meter.oom_score_adj = score
            await app.Daemon(node, runtime, admin, stop, reloader).run()

    undo = capture_library_logs(logs)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except InvariantError as error:
        print(f"kvd: it contradicts itself and stops: {error}", file=sys.stderr)
        return EXIT_INVARIANT
    finally:
        undo()
        logs.close()
    return 0


def _make_node(loaded: LoadedConfig, logs: Logs) -> Node:
    from kvd.server.node import Node

    return Node(loaded, logs)


@contextmanager
def _obeyed_signals(stop: asyncio.Event, reloader: Reloader) -> Iterator[None]:
    """Set `stop` at the first signal to stop and end at once at the second; reload at SIGHUP.

    Outside of this the signals are blocked: kvd ends soon, and is not to be interrupted in that.
    """

    def asked() -> None:
        if stop.is_set():
            # Asked twice: whoever asks does not want to wait.
            os._exit(EXIT_FORCED)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, asked)
    loop.add_signal_handler(signal.SIGHUP, reloader.ask)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OBEYED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, OBEYED_SIGNALS)


def _raise_file_limit() -> None:
    """Each session and connection needs descriptors; the usual soft limit is for small programs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
