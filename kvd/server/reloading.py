"""Loading the configuration again while kvd runs.

It is read in a worker thread, from where it came at the start. What is wrong with it is logged at
once, and nothing is changed then: kvd never runs with a part of a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvd.config.load import LoadedConfig, plan_reload
from kvd.core.errors import ConfigError

if TYPE_CHECKING:
    # Loaded beside the first answers, see `kvd.cli.serve`.
    from kvd.server.node import Node


class Reloader:
    """Loads the configuration again whenever it is asked to."""

    def __init__(self, read: Callable[[], LoadedConfig]) -> None:
        """Nothing is read before `begin`.

        Args: read: the whole of `load_config`, with the file, environment and flags of the start.
        """
        self._read = read
        self._node: Node | None = None
        self._is_asked = False
        self._is_reading = False

    def begin(self, node: Node) -> None:
        """Change this node from now on; who asked before is heard now."""
        self._node = node
        self._go_on()

    def end(self) -> None:
        """Change nothing any more."""
        self._node = None

    def ask(self) -> None:
        """Load the configuration soon; asked twice meanwhile, it is read once more after that."""
        self._is_asked = True
        self._go_on()

    def _go_on(self) -> None:
        if self._node is None or not self._is_asked or self._is_reading:
            return
        self._is_asked, self._is_reading = False, True
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, self._read).add_done_callback(self._was_read)

    def _was_read(self, done: asyncio.Future[LoadedConfig]) -> None:
        self._is_reading = False
        if done.cancelled():
            return
        error, node = done.exception(), self._node
        if node is None:
            return
        if error is None:
            apply_reload(node, done.result())
        elif isinstance(error, ConfigError):
            node.logs.warning("config_refused", problems=error.problems)
        else:
            # Whatever a file can do to its reader: what runs goes on with what it has.
            problem = f"{type(error).__name__}: {error}"
            node.logs.warning("config_refused", problems=[problem])
        self._go_on()


def apply_reload(node: Node, fresh: LoadedConfig) -> None:
    """Let a node go on with the reloadable keys of a configuration, and log what changed."""
    plan = plan_reload(node.loaded, fresh)
    told = {
        "changed": {key: f"{old} -> {new}" for key, (old, new) in plan.applied.items()},
        "needs_restart": {
            key: f"{old or '(empty)'} -> {new or '(empty)'}"
            for key, (old, new) in plan.pending_restart.items()
        },
    }
    # The level itself may be what changes: it is told if either of the two lets it through.
    is_heard = node.logs.wants("info")
    if is_heard:
        node.logs.info("config_reloaded", **told)
    node.reconfigure(plan.loaded)
    if not is_heard:
        node.logs.info("config_reloaded", **told)
