"""The block table by example: what it refuses, what it keeps, when a block becomes readable."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.core.blocks import BlockShape, BlockState, BlockTable, CommitStatus
from kvd.core.errors import LocalError
from kvd.core.evict import LruPolicy
from kvd.core.ids import LoadId, MemberRef, ReadId, RequestKey, SaveId, SlotRef
from kvd.store.dict_index import DictIndex

SHAPE = BlockShape(block_tokens=4, num_layers=2)
OWNER = RequestKey("p", "r")
OTHER = RequestKey("p", "other")
MEMBER = MemberRef("p", "w0", 1)
GRACE = 100


def make(total: int = 3) -> BlockTable:
    """An empty table."""
    return BlockTable(total, SHAPE, DictIndex(), LruPolicy(total))


def key(name: str) -> tuple[int, bytes]:
    """A key in namespace 1."""
    return 1, name.encode() * 32


def save_id(layer: int, serial: int = 0) -> SaveId:
    """The save of one layer."""
    return SaveId(SlotRef(MEMBER, layer, serial), "s")


def save(table: BlockTable, block: int, tokens: int, *, serial: int = 0) -> None:
    """Save both layers of a block, well."""
    for layer in range(SHAPE.num_layers):
        table.begin_save(save_id(layer, serial), layer, 0, (block,), (tokens,))
        table.end_save(save_id(layer, serial), True)


def make_ready(table: BlockTable, name: str, *, keep: bool = False) -> int:
    """A ready block with that key; its owner has gone unless `keep`."""
    [block] = table.reserve(OWNER, 1)
    save(table, block, 4)
    assert table.commit("p", block, key(name), 4) is CommitStatus.READY
    if not keep:
        table.abandon(block, OWNER, 0, GRACE)
    return block


def refused(call: Callable[[], object]) -> LocalError:
    """The error with which a call is refused."""
    with pytest.raises(LocalError) as caught:
        call()
    return caught.value


# What is refused -----------------------------------------------------------------------------


def test_reservation_beyond_the_pool_names_both_sizes() -> None:
    error = refused(lambda: make().reserve(OWNER, 4))
    assert error.code == "reserve_too_large"
    assert error.context == {"want": "4", "total": "3"}


def test_reservation_that_does_not_fit_takes_and_evicts_nothing() -> None:
    table = make()
    make_ready(table, "a")
    table.reserve(OWNER, 1)
    table.take_changes()
    error = refused(lambda: table.reserve(OTHER, 3))
    assert error.code == "pool_full"
    assert error.context == {"want": "3", "free": "1", "evictable": "1", "total": "3"}
    assert table.take_changes().evicted == []
    assert len(table.free) == 1


@pytest.mark.parametrize("block", [-1, 0, 2, 3])
def test_block_that_is_not_reserved_by_the_engine_cannot_be_saved_or_committed(block: int) -> None:
    table = make()
    table.reserve(RequestKey("q", "r"), 1)
    assert refused(lambda: table.check_save("p", block, 0, 0, 4)).code == "block_not_reserved"
    assert refused(lambda: table.commit("p", block, key("a"), 4)).code == "block_not_reserved"


@pytest.mark.parametrize("tokens", [-1, 0, 5])
def test_token_count_outside_a_block_is_refused(tokens: int) -> None:
    table = make()
    [block] = table.reserve(OWNER, 1)
    error = refused(lambda: table.check_save("p", block, 0, 0, tokens))
    assert error.code == "limit_reached"
    assert "over the limit of 4" in error.what


def test_span_is_saved_by_one_party_at_a_time() -> None:
    table = make()
    [block] = table.reserve(OWNER, 1)
    table.begin_save(save_id(0), 0, 0, (block,), (4,))
    error = refused(lambda: table.check_save("p", block, 0, 0, 4))
    assert (error.code, error.context["doing"]) == ("span_busy", "saved")
    table.check_save("p", block, 1, 0, 4)


def test_span_is_not_saved_while_it_is_loaded_or_read() -> None:
    table = make()
    [block] = table.reserve(OWNER, 1)
    save(table, block, 4)
    load, read = LoadId(SlotRef(MEMBER, 0, 9)), ReadId("t", 1, 0, 0)
    table.begin_load(load, 0, 0, (block,))
    table.pin_span(block, 1, read)
    assert refused(lambda: table.check_save("p", block, 0, 0, 4)).context["doing"] == "loaded"
    assert refused(lambda: table.check_save("p", block, 1, 0, 4)).context["doing"] == (
        "read remotely"
    )
    table.end_load(load)
    table.unpin_span(block, 1, read)
    table.check_save("p", block, 0, 0, 4)
    table.check_save("p", block, 1, 0, 4)


def test_load_of_more_than_was_saved_is_refused() -> None:
    table = make()
    [block] = table.reserve(OWNER, 1)
    save(table, block, 2)
    error = refused(lambda: table.check_load(OWNER, block, 1, 0, 3))
    assert error.code == "span_unwritten"
    assert (error.context["have"], error.context["want"]) == ("2", "3")
    table.check_load(OWNER, block, 1, 0, 2)


def test_load_of_what_is_not_pinned_or_is_poisoned_is_refused() -> None:
    table = make()
    block = make_ready(table, "a")
    assert refused(lambda: table.check_load(OWNER, block, 0, 0, 4)).code == "block_not_reserved"
    table.pin(block, OWNER)
    table.check_load(OWNER, block, 0, 0, 4)
    table.poison(block)
    assert refused(lambda: table.check_load(OWNER, block, 0, 0, 4)).code == "block_poisoned"


def test_poisoned_block_is_not_committed() -> None:
    table = make()
    [block] = table.reserve(OWNER, 1)
    table.poison(block)
    assert refused(lambda: table.commit("p", block, key("a"), 4)).code == "block_poisoned"
    assert table.index.get(*key("a")) is None


# When a block becomes readable ---------------------------------------------------------------


def test_commit_and_saves_make_a_block_ready_in_either_order() -> None:
    for commit_first in (True, False):
        table = make()
        [block] = table.reserve(OWNER, 1)
        if commit_first:
            assert table.commit("p", block, key("a"), 4) is CommitStatus.PENDING
        save(table, block, 4)
        if not commit_first:
            assert table.commit("p", block, key("a"), 4) is CommitStatus.READY
        assert table.index.get(*key("a")) == block
        assert table.take_changes().ready == [block]


def test_span_saved_for_an_earlier_chunk_does_not_count() -> None:
    table = make()
    [block] = table.reserve(OWNER, 1)
    save(table, block, 2)
    assert table.commit("p", block, key("a"), 4) is CommitStatus.PENDING
    table.begin_save(save_id(0, 1), 0, 0, (block,), (4,))
    table.end_save(save_id(0, 1), True)
    assert table.index.get(*key("a")) is None
    table.begin_save(save_id(1, 1), 1, 0, (block,), (4,))
    table.end_save(save_id(1, 1), True)
    assert table.index.get(*key("a")) == block


def test_save_that_made_fewer_tokens_valid_than_announced_does_not_count() -> None:
    table = make()
    [block] = table.reserve(OWNER, 1)
    table.commit("p", block, key("a"), 4)
    for layer in range(2):
        table.begin_save(save_id(layer), layer, 0, (block,), (4,))
        table.end_save(save_id(layer), True, (3,))
    assert table.state[block] == BlockState.FILLING


def test_failed_save_poisons_every_block_it_wrote_into() -> None:
    table = make()
    blocks = tuple(table.reserve(OWNER, 2))
    table.begin_save(save_id(0), 0, 0, blocks, (4, 4))
    table.end_save(save_id(0), False)
    assert [table.state[block] for block in blocks] == [BlockState.POISONED] * 2
    assert list(table.free) == [2]
    for block in blocks:
        table.abandon(block, OWNER, 0, GRACE)
    assert len(table.free) == 3


def test_second_block_of_a_key_is_told_so_and_never_becomes_readable() -> None:
    table = make()
    first = make_ready(table, "a", keep=True)
    [block] = table.reserve(OTHER, 1)
    save(table, block, 4)
    assert table.commit("p", block, key("a"), 4) is CommitStatus.DUPLICATE
    table.abandon(block, OTHER, 0, GRACE)
    assert table.index.get(*key("a")) == first
    assert block in table.free


def test_commit_refused_as_duplicate_takes_an_earlier_commit_back() -> None:
    """Else the block would become readable under the earlier key with what is saved later."""
    table = make()
    make_ready(table, "b", keep=True)
    [block] = table.reserve(OWNER, 1)
    assert table.commit("p", block, key("a"), 4) is CommitStatus.PENDING
    assert table.commit("p", block, key("b"), 4) is CommitStatus.DUPLICATE
    save(table, block, 4, serial=1)
    assert table.index.get(*key("a")) is None


def test_commit_that_is_sent_again_is_answered_as_before() -> None:
    table = make()
    block = make_ready(table, "a", keep=True)
    assert table.commit("p", block, key("a"), 4) is CommitStatus.READY
    assert refused(lambda: table.commit("p", block, key("b"), 4)).code == "block_not_reserved"


# What is kept (R11) ---------------------------------------------------------------------------


def test_block_is_kept_while_a_save_into_it_is_open_whatever_its_owner_does() -> None:
    table = make()
    [block] = table.reserve(OWNER, 1)
    table.begin_save(save_id(0), 0, 0, (block,), (4,))
    table.poison(block)
    table.abandon(block, OWNER, 0, GRACE)
    assert table.state[block] == BlockState.POISONED
    assert block not in table.reserve(OTHER, 2)
    table.end_save(save_id(0), True)
    assert list(table.free) == [block]
    assert table.index.get(*key("a")) is None


def test_pinned_block_is_not_evicted_and_the_longest_unused_goes_first() -> None:
    table = make()
    a, b, c = (make_ready(table, name) for name in "abc")
    table.pin(a, OTHER)
    table.pin(b, OTHER)
    table.unpin(b, OTHER)
    assert table.reserve(OWNER, 1) == [c]
    assert table.reserve(OWNER, 1) == [b]
    assert refused(lambda: table.reserve(OWNER, 1)).code == "pool_full"
    assert table.index.get(*key("a")) == a


def test_pins_go_by_name() -> None:
    table = make()
    block = make_ready(table, "a")
    table.pin(block, OTHER)
    table.pin(block, OTHER)
    table.unpin(block, OWNER)
    assert len(table.policy) == 0
    table.unpin(block, OTHER)
    assert list(table.policy) == [block]


def test_poisoned_block_is_kept_for_who_reads_it_and_found_by_nobody() -> None:
    table = make()
    block = make_ready(table, "a")
    read = ReadId("t", 0, 0, 0)
    table.pin_span(block, 0, read)
    table.poison(block)
    assert table.index.get(*key("a")) is None
    assert block not in table.free
    table.unpin_span(block, 0, read)
    assert block in table.free


def test_committed_block_outlives_its_owner_until_its_saves_end_or_the_grace_is_over() -> None:
    table = make()
    early, late = table.reserve(OWNER, 2)
    for serial, block in enumerate((early, late)):
        table.commit("p", block, key("el"[serial]), 4)
        table.begin_save(save_id(0, serial), 0, 0, (block,), (4,))
        table.begin_save(save_id(1, serial), 1, 0, (block,), (4,))
        table.abandon(block, OWNER, 0, GRACE)
    for layer in range(2):
        table.end_save(save_id(layer, 0), True)
    table.expire_orphans(GRACE - 1)
    assert table.state[late] == BlockState.FILLING
    table.expire_orphans(GRACE)
    assert table.index.get(*key("e")) == early
    assert table.state[late] == BlockState.POISONED
    for layer in range(2):
        table.end_save(save_id(layer, 1), True)
    assert late in table.free


def test_end_of_an_unknown_save_or_load_changes_nothing() -> None:
    table = make()
    [block] = table.reserve(OWNER, 1)
    table.end_save(save_id(0, 99), True)
    table.end_load(LoadId(SlotRef(MEMBER, 0, 99)))
    assert table.state[block] == BlockState.FILLING
    assert table.pins == {block: {OWNER}}


def test_rows_are_those_of_one_life_of_a_block() -> None:
    table = make()
    [block] = table.reserve(OWNER, 1)
    life = table.lives[block]
    save(table, block, 4)
    assert table.holds_rows(block, life, 0, 0, 4)
    table.poison(block)
    table.abandon(block, OWNER, 0, GRACE)
    assert not table.holds_rows(block, life, 0, 0, 1)
    assert block in table.reserve(OTHER, 3)
    save(table, block, 4, serial=1)
    assert not table.holds_rows(block, life, 0, 0, 1)
