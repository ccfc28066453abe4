"""A block table that takes over what an earlier life left."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.block_columns import BlockColumns
from kvd.core.blocks import BlockShape, BlockState, BlockTable
from kvd.core.errors import LocalError
from kvd.core.evict import LruPolicy
from kvd.core.ids import LoadId, MemberRef, RequestKey, SlotRef
from kvd.store.native_index import NativeIndex
from kvd.store.native_queues import NativeQueues

SHAPE = BlockShape(block_tokens=4, num_layers=2)
OWNER = RequestKey("p", "r")
LAST_LIFE = RequestKey("", "last life")
LOAD = LoadId(SlotRef(MemberRef("p", "w0", 1), 0, 0))


def key(block: int) -> tuple[int, bytes]:
    """A key of its own for each block."""
    return 1, block.to_bytes(2, "little") * 16


def left(states: list[BlockState]) -> BlockColumns:
    """Columns as a scan of such headers makes them."""
    columns = BlockColumns(len(states))
    for block, state in enumerate(states):
        columns.states[block] = state
        if state is BlockState.READY:
            columns.set_key(block, key(block), 4)
    return columns


def made_of(columns: BlockColumns) -> BlockTable:
    """A table that is about to adopt."""
    total = len(columns)
    index = NativeIndex()
    index.clear(total)
    return BlockTable(total, SHAPE, index, LruPolicy(total, NativeQueues), columns)


RESET, FILLING, READY = BlockState.RESET, BlockState.FILLING, BlockState.READY


def adopted(states: list[BlockState]) -> tuple[BlockTable, list[int]]:
    """A table that took such blocks over, and those that were being filled."""
    table = made_of(left(states))
    held, twice = table.adopt(LAST_LIFE)
    assert twice == []
    return table, held


def test_ready_blocks_are_found_loaded_and_evicted_in_order() -> None:
    table, held = adopted([READY, RESET, READY, RESET, READY])
    assert held == []
    assert table.counts == [2, 0, 3, 0]
    assert table.index.prefix(1, key(2)[1] + key(0)[1]) == [2, 0]
    table.pin_all([2], OWNER)
    table.check_load(OWNER, 2, 1, 0, 4)
    table.begin_load(LOAD, 1, 0, (2,))
    table.end_load(LOAD)
    assert table.reserve(RequestKey("p", "other"), 4) == [4, 0, 1, 3]
    assert table.take_changes().evicted == [0, 4]
    assert table.index.get(*key(4)) is None
    assert table.index.get(*key(2)) == 2


def test_commit_of_an_adopted_key_is_a_duplicate_and_of_its_block_is_answered_as_before() -> None:
    table, _ = adopted([READY, RESET])
    assert table.commit("p", 0, key(0), 4).name == "READY"
    [block] = table.reserve(OWNER, 1)
    assert table.commit("p", block, key(0), 4).name == "DUPLICATE"


def test_filling_blocks_are_kept_until_their_owner_abandons_them() -> None:
    table, held = adopted([FILLING, READY, FILLING])
    assert held == [0, 2]
    assert table.counts == [0, 2, 1, 0]
    with pytest.raises(LocalError) as caught:
        table.reserve(OWNER, 2)
    assert caught.value.code == "pool_full"
    with pytest.raises(LocalError) as caught:
        table.check_save("p", 0, 0, 0, 4)
    assert caught.value.code == "block_not_reserved"
    assert not table.holds_rows(0, table.lives[0], 0, 0, 1)
    table.abandon(2, LAST_LIFE, 0, 0)
    assert table.take_changes().freed == [2]
    assert table.reserve(OWNER, 1) == [2]
    assert table.pins[0] == {LAST_LIFE}


def test_second_block_of_a_key_is_free_and_told() -> None:
    columns = left([READY, READY, FILLING, READY])
    columns.set_key(3, key(0), 2)
    table = made_of(columns)
    assert table.adopt(LAST_LIFE) == ([2], [3])
    assert list(table.free) == [3]
    assert list(table.policy) == [0, 1]
    assert table.index.get(*key(0)) == 0
    assert len(table.index) == 2
    assert columns.tokens[3] == 0


def test_poisoned_adopted_block_is_freed_and_no_longer_found() -> None:
    table, _ = adopted([READY, READY])
    table.poison(0)
    assert table.index.get(*key(0)) is None
    assert list(table.free) == [0]
    assert list(table.policy) == [1]


def test_adopting_twice_or_poison_is_a_bug_of_the_caller() -> None:
    table, _ = adopted([READY, RESET])
    with pytest.raises(AssertionError, match="adopted too late"):
        table.adopt(LAST_LIFE)
    with pytest.raises(AssertionError, match="poison is never written"):
        made_of(left([BlockState.POISONED])).adopt(LAST_LIFE)


def test_a_large_table_is_no_work_for_the_collector() -> None:
    """Its objects are as many as those of a small one."""
    _, _ = adopted([READY] * 10)
    gc.collect()
    before = len(gc.get_objects())
    total = 20_000
    table = made_of(BlockColumns(total))
    table.adopt(LAST_LIFE)
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert len(table.free) == total


@settings(deadline=None)
@given(st.lists(st.sampled_from([RESET, FILLING, READY]), max_size=40))
def test_every_block_goes_where_its_state_belongs(states: list[BlockState]) -> None:
    table, held = adopted(states)
    assert held == [block for block, state in enumerate(states) if state is FILLING]
    assert list(table.policy) == [b for b, state in enumerate(states) if state is READY]
    assert list(table.free) == [b for b in reversed(range(len(states))) if states[b] is RESET]
    assert table.counts == [*(states.count(s) for s in (RESET, FILLING, READY)), 0]
