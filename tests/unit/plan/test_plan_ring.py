"""Which layer lives in which buffer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.plan.ring import RingPlan, plan_ring
from kvd.wire.layout import Part

MAIN = Part("main", 1152)
INDEX = Part("indexer", 132)


def plan(layers: Sequence[tuple[Part, ...]], **options: object) -> RingPlan:
    return plan_ring(layers, num_blocks=4, block_tokens=16, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shared": 0}, "num_shared must be at least 1, got 0"),
        ({"spare_buffers": -1}, "spare_buffers must be at least 0, got -1"),
        ({"independent": (7,)}, r"independent layer 7 is outside \[-3, 2\]"),
        ({"independent": (-4,)}, r"independent layer -4 is outside \[-3, 2\]"),
        ({"independent": "some"}, 'a list of layers or "all"'),
        ({"lookahead": 3}, r"lookahead of layer 0 is 3, outside \[0, 2\]"),
        ({"lookahead": (1, 1)}, "lookahead needs 3 entries"),
    ],
)
def test_wrong_values_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan([(MAIN,)] * 3, **options)
    with pytest.raises(ValueError, match="at least one"):
        plan([])


def test_four_of_seventy_eight() -> None:
    """One bound layer and three that rotate: about 5 % of a resident cache, and a spare."""
    ring = plan([(MAIN,)] * 78, num_shared=3, spare_buffers=0)
    assert len(ring.slots) == 4
    assert ring.slot_of[:8] == (0, 1, 2, 3, 1, 2, 3, 1)
    assert ring.device_bytes * 78 == ring.resident_bytes * 4
    assert ring.reuse


def test_companions_follow_their_layer_and_do_not_split_the_ring() -> None:
    layers = [(MAIN, INDEX) if layer % 4 == 0 else (MAIN,) for layer in range(12)]
    ring = plan(layers, num_shared=3)
    assert len(ring.slots) == 1 + 3 + 1
    assert all(ring.slots[slot].parts == (MAIN, INDEX) for slot in range(1, 5))
    assert ring.slots[0].parts == (MAIN, INDEX)


def test_a_companion_of_two_sizes_is_refused() -> None:
    layers = [(MAIN,), (MAIN, INDEX), (MAIN, Part("indexer", 64)), (MAIN,)]
    with pytest.raises(ValueError, match="part indexer has rows of different sizes"):
        plan(layers)


def test_different_main_parts_never_share() -> None:
    layers = [(MAIN,), (MAIN,), (Part("main", 656),), (MAIN,), (Part("main", 656),), (MAIN,)]
    ring = plan(layers, num_shared=1, independent=())
    for slot in ring.slots:
        assert len({layers[layer] for layer in slot.layers}) <= 1


@pytest.mark.parametrize("options", [{"independent": "all"}, {"num_shared": 9}])
def test_without_sharing_it_says_why(options: dict[str, object]) -> None:
    ring = plan([(MAIN,)] * 5, **options)
    assert not ring.reuse
    assert ring.why
    assert ring.spares == ()
    assert sorted(ring.slot_of) == list(range(5))


@given(
    st.integers(1, 30),
    st.sets(st.integers(0, 29)),
    st.integers(1, 5),
    st.integers(0, 2),
)
def test_every_layer_has_one_buffer(
    count: int, independent: set[int], shared: int, spares: int
) -> None:
    bound = tuple(layer for layer in independent if layer < count)
    ring = plan([(MAIN,)] * count, independent=bound, num_shared=shared, spare_buffers=spares)
    for layer in range(count):
        assert layer in ring.slots[ring.slot_of[layer]].layers
        assert ring.slots[ring.slot_of[layer]].bound == (layer in bound)
    rolling = count - len(bound)
    expected = len(bound) + min(shared, rolling) + (spares if rolling > shared else 0)
    assert len(ring.slots) == expected
    gaps = [layer for layer in range(count) if layer not in bound]
    for slot in ring.slots:
        if not slot.bound and slot.layers:
            places = [gaps.index(layer) for layer in slot.layers]
            assert all(b - a == min(shared, rolling) for a, b in itertools.pairwise(places))


def test_a_quarantined_slot_is_replaced_once() -> None:
    ring = plan([(MAIN,)] * 8, num_shared=2)
    (spare,) = ring.spares
    assert ring.spare_for(1) == spare
    moved = ring.rebind(1, spare)
    assert moved.spares == ()
    assert moved.spare_for(2) is None
    assert [moved.slot_of[layer] for layer in ring.slots[1].layers] == [spare] * 4
    assert moved.slots[1].layers == ()
    with pytest.raises(ValueError, match="is no spare"):
        moved.rebind(2, spare)
