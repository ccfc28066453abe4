"""Slot events of the wire as those of the core."""

from __future__ import annotations

import pytest

from kvd.core.slot_events import SaveSpec
from kvd.server.translate import save_specs
from kvd.wire.slot_items import SaveItem


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ([], ()),
        (["r"], ("r", "r")),
        (["r", "q"], ("r", "q")),
        (["r", "q", "p"], ("r", "q", "p")),
    ],
)
def test_one_request_is_that_of_all_blocks(named: list[str], meant: tuple[str, ...]) -> None:
    """Too many, or too few, are not made to fit: the core refuses them."""
    specs = save_specs([SaveItem("s", [4, 5], [16, 3], named)])
    assert specs == (SaveSpec("s", (4, 5), (16, 3), meant),)


def test_a_save_of_nothing_names_nobody() -> None:
    assert save_specs([SaveItem("s", [], [], ["r"])]) == (SaveSpec("s", (), (), ()),)
