"""The node as the admin surface sees it (`node_view.NodeView`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kvd import __version__
from kvd.config.load import ConfigRow, describe
from kvd.core.state import State
from kvd.core.units import format_size
from kvd.memory.region import RegionSnapshot
from kvd.server.consumer_links import ConsumerLinks
from kvd.server.loop_meter import LoopMeter
from kvd.server.node import Node
from kvd.server.node_view import Holding, LinkInfo, Phase, SessionInfo
from kvd.server.producer_links import ProducerLinks
from kvd.server.sessions import MemberSession, ReaderSession
from kvd.wire.hot_figures import LayerFigures, RequestFigures


class LiveView:
    """Reads the parts that the daemon is assembled of."""

    def __init__(self, node: Node, meter: LoopMeter) -> None:
        """Links are given later: admin answers before they exist."""
        self._node = node
        self._meter = meter
        self.boot_id = node.boot_id.hex()
        self.version = __version__
        self.started_at = time.time()
        self.stopping = False
        self.failure = ""
        self.producers: ProducerLinks | None = None
        self.consumers: ConsumerLinks | None = None

    def now(self) -> int:
        """See `NodeView`."""
        return self._node.now()

    def state(self) -> State:
        """See `NodeView`."""
        return self._node.state

    def phase(self) -> Phase:
        """See `NodeView`."""
        if self.failure:
            return Phase("failed", 0, self.failure)
        if self.stopping:
            return Phase("stopping", 100, "ends what is running")
        if self._node.is_ready:
            return Phase("ready")
        pool = self._node.memory.pool
        size = pool.size if pool is not None else 0
        percent = 100 * self._node.memory.populated // size if size else 0
        return Phase("starting", percent, "populates the pool")

    def headline(self) -> tuple[str, int | None]:
        """One line for the service manager, and the bytes populated so far while kvd starts."""
        phase = self.phase()
        pool = self._node.memory.pool
        size = format_size(pool.size) if pool is not None else "none"
        if phase.name == "starting":
            text = f"starting: {phase.percent}% of the pool ({size}) is populated"
            return text, self._node.memory.populated
        if phase.name != "ready":
            return f"{phase.name}: {phase.detail}", None
        state = self._node.state
        engines, members = len(state.engines), len(state.members)
        return f"ready: pool of {size}, {engines} engines, {members} members", None

    def regions(self) -> Sequence[RegionSnapshot]:
        """See `NodeView`."""
        return self._node.memory.snapshots()

    def holding(self) -> Holding:
        """See `NodeView`."""
        memory = self._node.memory
        owner = memory.owner
        wanted = self._node.config.pool.owner
        return Holding(owner.name, wanted, owner.survives, memory.note)

    def sessions(self) -> Sequence[SessionInfo]:
        """See `NodeView`."""
        found = []
        for session in self._node.sessions.by_token.values():
            if isinstance(session, MemberSession):
                found.append(
                    SessionInfo(
                        "member",
                        str(session.ref),
                        session.pid,
                        session.uid,
                        session.attached_at,
                        session.last_heard,
                        session.store,
                        session.about,
                    )
                )
            elif isinstance(session, ReaderSession):
                found.append(
                    SessionInfo(
                        "reader",
                        session.executor,
                        session.pid,
                        session.uid,
                        session.attached_at,
                        session.last_heard,
                    )
                )
        return found

    def links(self) -> Sequence[LinkInfo]:
        """See `NodeView`."""
        found = []
        for out in self.producers.links if self.producers is not None else ():
            boot = out.executor.removeprefix("kvd#")
            found.append(
                LinkInfo(out.address, "consumer", boot, out.state, out.last_heard, out.error)
            )
        for link in self.consumers.links if self.consumers is not None else ():
            state = "lost" if link.broken else "ready"
            found.append(LinkInfo("", "producer", link.boot_id.hex(), state, link.last_heard))
        return found

    def shell_counters(self) -> Mapping[str, int]:
        """See `NodeView`."""
        return {**self._node.counters, "log_events_dropped": self._node.logs.dropped}

    def stats(self) -> Mapping[str, Mapping[str, float]]:
        """See `NodeView`."""
        members = self._node.sessions.members
        return {str(ref): session.stats for ref, session in members.items() if session.stats}

    def hot_figures(self) -> Mapping[str, tuple[Sequence[LayerFigures], Sequence[RequestFigures]]]:
        """See `NodeView`."""
        members = self._node.sessions.members
        return {str(ref): session.hot for ref, session in members.items() if any(session.hot)}

    def config_rows(self) -> Sequence[ConfigRow]:
        """See `NodeView`."""
        return describe(self._node.loaded)

    def oldest_wait_limit(self) -> int:
        """See `NodeView`."""
        return self._node.config.readiness.oldest_wait_max

    def loop_figures(self) -> Mapping[str, float]:
        """See `NodeView`."""
        return self._meter.figures()
