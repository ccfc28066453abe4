"""Notices that the owner of the memory is gone, and finds another: kvd alone holds it meanwhile."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

from kvd.core.errors import LocalError
from kvd.memory.owners.base import close_all, kept_member

if TYPE_CHECKING:
    from kvd.server.node import Node

RETRY_SECONDS: Final = 1.0


class OwnerWatch:
    """Watches the connection to the owner, where there is one."""

    def __init__(self, node: Node) -> None:
        """Nothing is watched before `start`."""
        self._node = node
        self._fd = -1
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch the owner that the pool was made with."""
        self._fd = self._node.memory.owner.connection_fd
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._lost)

    def _lost(self) -> None:
        """It says nothing unasked: it is gone, or breaks off."""
        self._unwatch()
        memory = self._node.memory
        memory.lose_owner()
        self._node.counters["owner_lost"] += 1
        self._node.logs.warning("the owner of the memory is gone", detail=memory.note)
        self._task = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        node = self._node
        while True:
            pidfds = {
                kept_member(ref): os.dup(session.pidfd)
                for ref, session in node.sessions.members.items()
                if session.pidfd >= 0 and ref in node.state.members
            }
            try:
                await node.memory.renew_owner(pidfds)
            except LocalError as error:
                node.memory.note = f"the pool ends with kvd: {error.what}"
                await asyncio.sleep(RETRY_SECONDS)
                continue
            finally:
                close_all(pidfds)
            node.logs.info("another owner has the memory", owner=node.memory.owner.name)
            self.start()
            return

    def _unwatch(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._fd = -1

    async def close(self) -> None:
        """Watch no more; a search under way ends."""
        self._unwatch()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
