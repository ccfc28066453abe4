"""What the admin surface sees of the node; the daemon's assembly implements it.

Everything here is read from the event loop and must answer at once: what is slow to find out
(e.g. the kernel's view of a mapping) is kept by the implementation and refreshed elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    # The admin socket answers before the rest of the daemon is loaded; see `admin.py`.
    from kvd.config.load import ConfigRow
    from kvd.core.state import State
    from kvd.memory.region import RegionSnapshot
    from kvd.wire.hot_figures import LayerFigures, RequestFigures

PhaseName: TypeAlias = Literal["starting", "ready", "stopping", "failed"]

SPARE_LEFT = "spare_left"
"""The stat with which an engine says how many spare buffers it has left."""

KEEPS_DEVICE = "keeps_device_kv"
"""The stat with which an engine says that it runs in a way that is for debugging, if not 0."""

SAVES_SHED = "saves_shed"
"""The stat with which an engine says how many blocks it did not save under pressure."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Where the daemon is in its life.

    percent: of the host memory that is populated, 0 to 100; 100 once it is not starting any more.
    detail:  for people: what it is doing, or why it failed.
    """

    name: PhaseName
    percent: int = 100
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One attached process.

    name:           a member as `engine/member#incarnation` (the text of its MemberRef); a reader
                    as its executor name.
    attached_at_ns: machine clock.
    last_heard_ns:  machine clock; when its last frame came, or when it attached.
    store:          of a member: the store that it uses, '' before its hello.
    about:          of a member: what it says of itself, printable.
    """

    kind: Literal["member", "reader"]
    name: str
    pid: int
    uid: int
    attached_at_ns: int
    last_heard_ns: int
    store: str = ""
    about: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """One link to another kvd.

    role:          what the peer is: the one that offers rows, or the one that reads them.
    boot_id:       hex, '' before its handshake.
    state:         for people, one word: connecting, up, lost, refused ...
    last_heard_ns: machine clock, 0 for never.
    error:         why it is not up, '' when it is.
    """

    address: str
    role: Literal["producer", "consumer"]
    boot_id: str
    state: str
    last_heard_ns: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Holding:
    """Who keeps the memory.

    owner:    holder, fdstore or none.
    wanted:   pool.owner of the configuration.
    survives: whose end the content outlives.
    note:     what became of an earlier life's memory, or of the owner that was asked for.
    """

    owner: str
    wanted: str
    survives: tuple[str, ...]
    note: str = ""


class NodeView(Protocol):
    """The node, read only."""

    boot_id: str
    """This life of kvd, hex."""

    version: str

    started_at: float
    """Wall clock, seconds since 1970."""

    def now(self) -> int:
        """The machine's clock, ns."""

    def state(self) -> State:
        """The live books: to be read within one callback, nothing kept of them across awaits."""

    def phase(self) -> Phase:
        """Where the daemon is in its life."""

    def regions(self) -> Sequence[RegionSnapshot]:
        """All host memory: pool data, pool metadata, decode regions, gate pages together."""

    def holding(self) -> Holding:
        """Who keeps the memory beside kvd."""

    def sessions(self) -> Sequence[SessionInfo]:
        """Attached processes."""

    def links(self) -> Sequence[LinkInfo]:
        """Links to other kvds."""

    def shell_counters(self) -> Mapping[str, int]:
        """What the shell counts: frames_received, frames_refused_<code>, replies_dropped ...

        Names are fixed strings of the code, never input; values only grow.
        """

    def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Figures that engines pushed, by member as in `SessionInfo.name`."""

    def hot_figures(self) -> Mapping[str, tuple[Sequence[LayerFigures], Sequence[RequestFigures]]]:
        """What decode does with hot buffers, by member: figures of layers and of requests."""

    def config_rows(self) -> Sequence[ConfigRow]:
        """Every key of the configuration."""

    def oldest_wait_limit(self) -> int:
        """How long a wait may last before the node is not ready, ns."""

    def loop_figures(self) -> Mapping[str, float]:
        """How the process fares: rss_bytes, loop_lag_seconds ...; never negative."""
