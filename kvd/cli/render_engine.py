"""What engines say of themselves, as `kvctl` shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvd.server.models import EngineSummary
from kvd.server.models_tables import EngineView

SHOWN_IN_STATUS: Final = ("offload", "why")
"""How it offloads, and why so or not."""


def engine_line(engine: EngineSummary) -> str:
    """What the status shows of it, '' for nothing; `kvctl engines` has the rest."""
    told = ((name, engine.about.get(name, "")) for name in SHOWN_IN_STATUS)
    return "; ".join(f"{name} {text}" for name, text in told if text)


def engine_facts(engine: EngineView) -> Iterable[tuple[str, str]]:
    """Everything that it says, a name and a text for each line, and who says otherwise."""
    for name, text in engine.about.items():
        yield name, text
        for member in engine.members:
            other = member.about.get(name, text)
            if other != text:
                yield f"{name} ({member.member})", other
