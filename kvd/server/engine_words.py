"""What an engine says of itself for people: the word of its scheduler, completed by its workers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from kvd.core.state import Engine
from kvd.server.node_view import NodeView, SessionInfo
from kvd.wire.protocol import ABOUT_ENTRIES_MAX


class EngineWords(NamedTuple):
    """The store that an engine uses, '' if unknown, and what it says of itself."""

    store: str
    about: dict[str, str]


def sessions_of(view: NodeView) -> dict[str, SessionInfo]:
    """Attached processes by name."""
    return {session.name: session for session in view.sessions()}


def engine_words(engine: Engine, sessions: Mapping[str, SessionInfo]) -> EngineWords:
    """Schedulers first, then by name; the first that says something about a thing counts.

    Args: sessions: as `sessions_of` has them.
    """
    members = sorted(engine.members.items(), key=lambda item: (not item[1].is_scheduler, item[0]))
    store = ""
    about: dict[str, str] = {}
    for _, member in members:
        session = sessions.get(str(member.ref))
        if session is not None:
            store = store or session.store
            for key, text in session.about.items():
                about.setdefault(key, text)
    return EngineWords(store, dict(islice(about.items(), ABOUT_ENTRIES_MAX)))
