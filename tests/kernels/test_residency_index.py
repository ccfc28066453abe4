"""The index of a table with few slots: refusals first, then lines that are full."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvd_kernels.residency import HotStep, HotTables
from tests.kernels.residency_cases import Pair, every_kernel, give

LINE = 16  # words
POSITION_BITS = 20
MULTIPLIER = 0x9E377  # of an index that was never made anew


def with_products(products: Sequence[int]) -> list[int]:
    """Return the positions whose products with the multiplier are these."""
    inverse = pow(MULTIPLIER, -1, 1 << POSITION_BITS)
    return [product * inverse % (1 << POSITION_BITS) for product in products]


# --- refusals, and what is chosen -----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["", "Map", "hash"])
def test_layouts_that_are_not_there(layout: str) -> None:
    with pytest.raises(ValueError, match=f"layout is '{layout}' but must be auto, map or index"):
        HotTables(1, 4, 100, layout=layout)


@pytest.mark.parametrize(
    ("slots", "positions_max", "layout"),
    [
        (8, 31, "map"),
        (8, 32, "index"),
        (9, 63, "map"),
        (9, 64, "index"),
        (4096, 1 << 15, "index"),
        (8192, 1 << 17, "index"),
        (32_768, 1 << 17, "index"),
        (32_769, 1 << 17, "map"),
        (65_536, 1 << 18, "map"),
        (65_536, 1 << 19, "index"),
        (131_072, 1 << 20, "index"),
        (32_768, 1 << 20, "index"),
        (1 << 18, 1 << 20, "map"),
    ],
)
def test_layout_by_size(slots: int, positions_max: int, layout: str) -> None:
    tables = HotTables(1, slots, positions_max)
    assert tables.layout == layout
    by_map = HotTables(1, slots, positions_max, layout="map").table_bytes
    assert tables.table_bytes <= by_map


def test_check_sees_a_broken_index() -> None:
    tables, step = HotTables(1, 4, 100, layout="index"), HotStep(1, 8)
    give(step, [[1, 2, 3, 4]])
    step.select(tables, 0, 1)
    words = np.asarray(tables.cache_slots(0))
    assert np.count_nonzero(words) == 4
    kept = int(words[np.flatnonzero(words)[0]])
    words[np.flatnonzero(words)[0]] = 0
    assert tables.check(0) == ["a slot is lost"]
    words[np.flatnonzero(words == 0)[-1]] = kept
    assert tables.check(0) == []
    words[np.flatnonzero(words == 0)[-1]] = kept
    assert tables.check(0) == ["the index has 5 words for 4 rows"]


@every_kernel
def test_words_that_lead_nowhere_harm_nothing(kernel: str) -> None:
    tables = HotTables(1, 5, 1 << 20, layout="index")
    step = HotStep(1, 32, kernel=kernel)
    for word in (0xFFFFFFFF, 6 << 29 | 1 << 8, 7 << 29 | 5, 1, 1 << 8):
        np.asarray(tables.cache_slots(0))[:] = word
        give(step, [range(1, 31)])
        assert step.lookup(tables, 0, 0) == 30
        assert tables.slot_of(0, 1) == -1


# --- lines that are full --------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("slots", [16, 17, 64, 130])
def test_more_rows_of_one_line_than_it_has_words(kernel: str, slots: int) -> None:
    """Rows go on to the lines behind it, the first ones after the last, and come back."""
    pair = Pair(slots, kernel=kernel, layout="index", k=256)
    num_lines = len(pair.tables.cache_slots(1)) // LINE
    width = (1 << POSITION_BITS) // num_lines
    last = with_products(range((num_lines - 1) * width, (num_lines - 1) * width + 3 * slots))
    draw = random.Random(slots)
    for _ in range(25):
        pair.begin_step()
        pair.select(draw.sample(last, draw.randint(1, min(2 * slots, 250))))
        pair.invalidate_from(draw.choice(last))
    pair.reset()
    pair.begin_step()
    pair.select(last[:slots])


@every_kernel
def test_more_rows_of_neighbouring_lines_than_a_word_can_count(kernel: str) -> None:
    """The index is made anew by another multiplier, in the middle of a step that evicts."""
    pair = Pair(8192, kernel=kernel, layout="index", queries=2, k=4096)
    close = with_products(range(3 * 4096))
    others = sorted(set(range(8192)) - set(close))[:4096]
    for selections in ([others], [close[:4096], close[4096:8192]], [close[8192:], others[:100]]):
        pair.begin_step()
        pair.select(*(sorted(selection) for selection in selections))
    words = np.asarray(pair.tables.cache_slots(1)).reshape(-1, LINE)
    assert np.count_nonzero(words[768:]) > 0, "by the first multiplier they reach line 511"
