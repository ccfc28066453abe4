"""The daemon: parts in the order in which they start, and in the reverse order they stop.

1. configuration, runtime directory and its lock, the first probe's answer (the caller has them)
2. the pool of the last life is taken over, or a new one planned; what cannot be had is refused
   before an engine can attach
3. admin.sock shows the node (STARTING, percent), attach.sock and engine.sock listen
4. the pool is populated in a worker thread; then everything else is answered, too
5. on SIGHUP the configuration is loaded again
6. on SIGTERM or SIGINT: requests are refused, copies end, memory is given back
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from kvd.core.errors import InvariantError, KvdError, LocalError
from kvd.memory.sd_notify import notify
from kvd.server.attach_socket import AttachSocket
from kvd.server.collector import Collector
from kvd.server.consumer_links import ConsumerLinks
from kvd.server.heartbeat import Heartbeat
from kvd.server.ipc import EngineSocket
from kvd.server.last_life import LastLife
from kvd.server.live_view import LiveView
from kvd.server.node import TICK_SECONDS, Node
from kvd.server.owner_watch import OwnerWatch
from kvd.server.producer_links import ProducerLinks
from kvd.server.reloading import Reloader

if TYPE_CHECKING:
    from kvd.memory.runtime import RuntimeDir
    from kvd.server.admin import AdminServer


class Daemon:
    """One kvd, from its sockets to its end."""

    def __init__(
        self,
        node: Node,
        runtime: RuntimeDir,
        admin: AdminServer,
        stop: asyncio.Event,
        reloader: Reloader | None = None,
        *,
        use_kernel_pidfd: bool = True,
    ) -> None:
        """Assemble; `run` does the rest.

        Args:
            admin: answers probes already, and is stopped here.
            stop: set when the daemon is to end.
            reloader: is shown the node once that runs.
            use_kernel_pidfd: see `AttachSocket`.
        """
        self._node = node
        self._admin = admin
        self._runtime = runtime
        self._use_kernel_pidfd = use_kernel_pidfd
        self._meter = node.meter
        self._view = LiveView(node, self._meter)
        self._stop = stop
        self._reloader = reloader
        self._bug: InvariantError | None = None
        self._has_started = False
        self._last_life = LastLife(node)
        self._owner_watch = OwnerWatch(node)
        self._collector = Collector()
        self._heart = Heartbeat()
        self._meter.relief = self._collector.young
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._attach: AttachSocket | None = None
        self._engines: EngineSocket | None = None
        self._producers: ProducerLinks | None = None
        self._consumers: ConsumerLinks | None = None

    async def run(self) -> None:
        """Serve until it is time to stop.

        Raises: KvdError when the pool cannot be had, InvariantError when kvd contradicts itself;
            everything is given back before.
        """
        asyncio.get_running_loop().set_exception_handler(self._on_exception)
        try:
            await self._node.memory.make_pool(self._runtime.hold_socket)
            self._last_life.adopt()
            self._owner_watch.start()
            await self._listen()
            if self._reloader is not None:
                self._reloader.begin(self._node)
            await self._populate()
            await self._stop.wait()
            notify("STOPPING=1")
        finally:
            await self._shut_down()
        if self._bug is not None:
            raise self._bug

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback that raises has left a step half done: kvd stops rather than continue wrong.

        What a library's task or transport meets is only logged.
        """
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is None or "handle" not in context or self._bug is not None:
            return
        if isinstance(error, InvariantError):
            self._bug = error
        else:
            self._bug = InvariantError([f"{type(error).__name__}: {error}"])
        self._stop.set()

    def _farewell(self) -> KvdError:
        """What is answered to those who wait for something still."""
        if self._bug is None:
            return LocalError("stopping")
        return KvdError("internal", detail=str(self._bug))

    # Start ------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Answer on all sockets; only the admin API has much to say yet."""
        node, runtime = self._node, self._runtime
        self._admin.show(self._view)
        self._context = zmq.Context()
        self._attach = AttachSocket(
            node, runtime.attach_socket, use_kernel_pidfd=self._use_kernel_pidfd
        )
        self._engines = EngineSocket(node, self._context, runtime.engine_socket)
        self._producers = ProducerLinks(node, self._context, self._attach, runtime.attach_socket)
        self._consumers = ConsumerLinks(node, self._context)
        self._engines.ports = self._consumers.ports
        self._view.producers, self._view.consumers = self._producers, self._consumers
        self._open_to_others(runtime.attach_socket, runtime.engine_socket)
        self._attach.start()
        self._engines.start()
        self._schedule_tick()

    def _open_to_others(self, *paths: Path) -> None:
        """Let users of `server.allowed_uids` reach the sockets; each is checked at attach."""
        if self._node.config.server.allowed_uids:
            for path in paths:
                path.chmod(0o666)

    async def _populate(self) -> None:
        node = self._node
        self._has_started = True
        node.logs.info("started", boot_id=node.boot_id.hex(), runtime_dir=str(self._runtime.path))
        populate = asyncio.ensure_future(node.memory.populate_pool())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({populate, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not populate.done():
            self._view.stopping = True
            node.memory.stop()
        try:
            await populate
        except KvdError as error:
            self._view.failure = str(error)
            raise
        # Nobody could watch a node whose admin API cannot be loaded: it does not become ready.
        await self._admin.opened()
        if not self._stop.is_set():
            node.is_ready = True
            self._meter.reset_max()
            node.logs.info("ready", pool_bytes=node.memory.populated)
            self._heart.ready(self._view.headline()[0])

    # Time -------------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + TICK_SECONDS
        self._timer = loop.call_at(self._due, self._on_tick)

    def _on_tick(self) -> None:
        late = asyncio.get_running_loop().time() - self._due
        self._meter.lagged(int(late * 1e9))
        self._node.tick()
        self._heart.beat(self._due, self._view.headline)
        before = time.thread_time_ns()
        self._collector.tick(self._node.counters["frames_received"])
        self._meter.add("collector", time.thread_time_ns() - before)
        self._schedule_tick()

    # Stop -------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """Give everything back, whatever was reached."""
        node = self._node
        self._view.stopping = True
        if self._reloader is not None:
            self._reloader.end()
        node.is_ready, node.is_stopping = False, True
        node.replies.refuse_all(self._farewell())
        timer = getattr(self, "_timer", None)
        if timer is not None:
            timer.cancel()
        if self._producers is not None:
            self._producers.close()
        if self._consumers is not None:
            await self._consumers.drain(node.config.server.grace_period / 1e9)
            self._consumers.close()
        if self._engines is not None:
            self._engines.close()
        if self._attach is not None:
            self._attach.close()
        node.close_sessions()
        self._last_life.close()
        await self._owner_watch.close()
        node.memory.close(keep=self._bug is not None)
        if self._context is not None:
            # What a start that failed half way left open would be waited for without end.
            self._context.destroy()
        await self._admin.stop()
        self._collector.close()
        if self._has_started:
            node.logs.info("stopped")
