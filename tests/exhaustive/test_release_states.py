"""The diagram of slot states is what the code does, and can be drawn."""

from __future__ import annotations

import re

import pytest

from tests.exhaustive.classes import StateClass
from tests.exhaustive.diagram import DOCUMENT, render
from tests.exhaustive.worlds import mapped


@pytest.mark.slow
def test_document_is_what_the_exploration_shows() -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    assert written == render(), "run `python -m tests.exhaustive.diagram` and look at the change"


@pytest.mark.slow
def test_diagram_has_only_arrows_between_states() -> None:
    text = render()
    diagram = text[text.index("```mermaid") : text.index("```\n", text.index("```mermaid"))]
    names = "|".join(state.value for state in StateClass)
    arrow = re.compile(rf"    ({names}) --> ({names}): [A-Za-z0-9, ]+")
    lines = diagram.splitlines()[3:]
    assert len(lines) > 20
    assert all(arrow.fullmatch(line) for line in lines)


@pytest.mark.slow
def test_time_alone_frees_nothing_but_offers() -> None:
    """Of all classes, only a slot that is draining can be freed by a tick (of its last offer)."""
    freed = {edge.before for edge in mapped()[1] if edge.event == "Ticked" and not edge.ignored}
    to_free = {
        edge.before
        for edge in mapped()[1]
        if edge.event == "Ticked" and edge.after is StateClass.FREE
    }
    assert freed == set(StateClass)
    assert to_free == {StateClass.FREE, StateClass.DRAINING}
