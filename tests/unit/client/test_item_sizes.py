"""Slot events whose size is known without encoding them."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.client.item_sizes import LAYERS_MAX, PLAIN_BYTES, is_plain
from kvd.wire.gate_layout import EPOCH_MAX
from kvd.wire.slot_items import (
    DID_MAX,
    AcquiredItem,
    BadSumItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    PoisonedItem,
    ReadItem,
    SaveEndedItem,
    SaveItem,
    SlotItem,
    StepClosedItem,
    StepOpenedItem,
    UsedItem,
    WrittenItem,
)

SLOTS: Final = st.integers(0, 1 << 20)
EPOCHS: Final = st.integers(0, EPOCH_MAX)
LAYERS: Final = st.integers(-3, 1 << 40)
STEPS: Final = st.integers(0, (1 << 64) - 1)
SAVERS: Final = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)
OKS: Final = st.booleans()
LOADS: Final = st.lists(st.builds(LoadItem, st.just("r"), st.just([1]), st.just(4)), max_size=1)
SAVES: Final = st.lists(st.builds(SaveItem, st.just("s"), st.just([1]), st.just([4])), max_size=1)
READS: Final = st.lists(
    st.builds(ReadItem, st.just("t"), st.just("h:1"), st.just(0), st.just(1), st.just([])),
    max_size=1,
)
BAD: Final = st.lists(st.builds(BadSumItem, st.just(1), st.just(2), st.just(3)), max_size=1)
ITEMS: Final = st.one_of(
    st.builds(AcquiredItem, SLOTS, EPOCHS, LAYERS, LOADS),
    st.builds(LoadEndedItem, SLOTS, EPOCHS, OKS, BAD),
    st.builds(WrittenItem, SLOTS, EPOCHS, LAYERS, SAVES, READS),
    st.builds(ComputedItem, SLOTS, EPOCHS, OKS),
    st.builds(
        SaveEndedItem,
        SLOTS,
        EPOCHS,
        SAVERS,
        OKS,
        st.lists(st.integers(0, 9), max_size=1),
        st.binary(max_size=1),
    ),
    st.builds(PoisonedItem, SLOTS, EPOCHS),
    st.builds(StepOpenedItem, st.integers(1, 1 << 60), LOADS, SAVES),
    st.builds(StepClosedItem, st.integers(1, (1 << 64) - 1)),
)


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(ITEMS)
def test_kvd_can_read_a_plain_event_and_it_is_as_short_as_that(item: SlotItem) -> None:
    """Of a tenancy and a saver that are in the books; a step counts from 1."""
    data = msgspec.msgpack.encode(item)
    if is_plain(item) or isinstance(item, StepClosedItem):
        assert len(data) <= PLAIN_BYTES
        assert msgspec.msgpack.decode(data, type=SlotItem) == item


ASCII: Final = st.text(st.characters(max_codepoint=127), max_size=64)
DID: Final = st.integers(1, DID_MAX)
USED: Final = st.builds(
    UsedItem, SLOTS, EPOCHS, st.integers(-1, LAYERS_MAX - 1), DID, STEPS, STEPS, ASCII
)


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(USED)
def test_kvd_can_read_what_went_well_and_it_is_as_short_as_that(item: UsedItem) -> None:
    data = msgspec.msgpack.encode(item)
    assert len(data) <= PLAIN_BYTES
    assert msgspec.msgpack.decode(data, type=SlotItem) == item


@pytest.mark.parametrize(
    ("item", "plain"),
    [
        (AcquiredItem(0, 0), True),
        (AcquiredItem(0, 0, -2), False),
        (AcquiredItem(0, 0, 3, [LoadItem("r", [1], 4)]), False),
        (WrittenItem(0, 0, -1), False),
        (WrittenItem(0, 0, 3, [SaveItem("s", [1], [4])]), False),
        (WrittenItem(0, 0, 3, [], [ReadItem("t", "h:1", 0, 1, [])]), False),
        (SaveEndedItem(0, 0, "s", True), True),
        (SaveEndedItem(0, 0, "s", True, [4]), False),
        (SaveEndedItem(0, 0, "s", True, [], b"1234"), False),
        (SaveEndedItem(0, 0, "\N{SNOWMAN}" * 64, True), False),
        (LoadEndedItem(0, 0, True), True),
        (LoadEndedItem(0, 0, True, [BadSumItem(1, 2, 3)]), False),
        (ComputedItem(0, 0), True),
        (PoisonedItem(0, 0), True),
        (StepOpenedItem(1), False),
    ],
)
def test_what_has_a_length_is_not_plain(item: SlotItem, plain: bool) -> None:
    assert is_plain(item) == plain
