"""Saves and loads of many blocks at once: refused, and kept, as one block would be."""

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
COUNT = 4


def make() -> tuple[BlockTable, list[int], int]:
    """A table, blocks of a request, and one of another request."""
    table = BlockTable(2 * COUNT, SHAPE, DictIndex(), LruPolicy(2 * COUNT))
    return table, table.reserve(OWNER, COUNT), table.reserve(OTHER, 1)[0]


def save_id(serial: int) -> SaveId:
    """A name of a save."""
    return SaveId(SlotRef(MEMBER, serial, 0), "s")


def load_id(serial: int) -> LoadId:
    """A name of a load."""
    return LoadId(SlotRef(MEMBER, serial, 0))


def save_now(table: BlockTable, blocks: list[int], layer: int, tokens: int = 4) -> None:
    """Save a layer of blocks, well."""
    save = save_id(layer)
    table.begin_save(save, layer, 0, tuple(blocks), (tokens,) * len(blocks))
    table.end_save(save, True)


def poison(table: BlockTable, block: int) -> None:
    table.poison(block)


def read(table: BlockTable, block: int) -> None:
    table.pin_span(block, 0, ReadId("t", 0, 0, 0))


def load(table: BlockTable, block: int) -> None:
    table.begin_load(load_id(0), 0, 0, (block,))


def save(table: BlockTable, block: int) -> None:
    table.begin_save(save_id(0), 0, 0, (block,), (4,))


def make_ready(table: BlockTable, block: int) -> None:
    for layer in range(SHAPE.num_layers):
        save_now(table, [block], layer)
    assert table.commit("p", block, (1, b"k" * 32), 4) is CommitStatus.READY


@pytest.mark.parametrize("at", range(COUNT))
@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (poison, "block_poisoned"),
        (read, "span_busy"),
        (load, "span_busy"),
        (save, "span_busy"),
        (make_ready, "block_not_reserved"),
    ],
)
def test_one_block_that_may_not_be_saved_refuses_all(
    spoil: Callable[[BlockTable, int], None], code: str, at: int
) -> None:
    table, blocks, _ = make()
    spoil(table, blocks[at])
    arguments = ("p", blocks, 0, 0, [4] * COUNT)
    for name in (OWNER.request, ""):
        with pytest.raises(LocalError) as caught:
            table.check_saves(*arguments, [name] * COUNT)
        assert (caught.value.code, caught.value.context["block"]) == (code, str(blocks[at]))
    if code == "span_busy":  # the other layer is not touched
        table.check_saves("p", blocks, 1, 0, [4] * COUNT, [OWNER.request] * COUNT)


@pytest.mark.parametrize("at", range(COUNT))
@pytest.mark.parametrize("tokens", [0, -1, 5])
def test_one_count_that_cannot_be_refuses_all(at: int, tokens: int) -> None:
    table, blocks, _ = make()
    counts = [4] * COUNT
    counts[at] = tokens
    with pytest.raises(LocalError) as caught:
        table.check_saves("p", blocks, 0, 0, counts, [OWNER.request] * COUNT)
    assert (caught.value.code, caught.value.context["value"]) == ("limit_reached", str(tokens))


@pytest.mark.parametrize("stranger", [-1, 2 * COUNT, 2 * COUNT - 1])
def test_blocks_of_nobody_are_refused(stranger: int) -> None:
    table, blocks, _ = make()
    for names in ([OWNER.request] * 2, ["", ""], [OWNER.request, OTHER.request]):
        with pytest.raises(LocalError, match="block_not_reserved"):
            table.check_saves("p", [blocks[0], stranger], 0, 0, [4, 4], names)


def test_each_block_is_of_the_request_that_is_named_with_it() -> None:
    table, blocks, foreign = make()
    both = [*blocks, foreign]
    names = [OWNER.request] * COUNT
    table.check_saves("p", both, 0, 0, [4] * 5, [*names, OTHER.request])
    table.check_saves("p", both, 0, 0, [4] * 5, [*names, ""])
    for wrong in ([*names, OWNER.request], [OTHER.request] * 5, [OTHER.request, *names]):
        with pytest.raises(LocalError, match="block_not_reserved"):
            table.check_saves("p", both, 0, 0, [4] * 5, wrong)
    with pytest.raises(LocalError, match="block_not_reserved"):
        table.check_saves("q", blocks, 0, 0, [4] * COUNT, names)


def test_lists_of_unequal_lengths_are_no_save() -> None:
    table, blocks, _ = make()
    with pytest.raises(ValueError, match="shorter"):
        table.check_saves("p", blocks, 0, 0, [4], [OWNER.request] * COUNT)
    table.check_saves("p", [], 0, 0, [], [])


def test_a_block_is_not_ready_while_a_span_of_it_is_saved_again() -> None:
    table, blocks, _ = make()
    for layer in range(SHAPE.num_layers):
        save_now(table, blocks, layer)
    again = save_id(9)
    table.begin_save(again, 0, 0, tuple(blocks), (4,) * COUNT)
    assert table.commit("p", blocks[0], (1, b"k" * 32), 4) is CommitStatus.PENDING
    assert not table.holds_rows(blocks[0], table.lives[blocks[0]], 0, 0, 4)
    table.end_save(again, True)
    assert table.state[blocks[0]] == BlockState.READY
    assert table.holds_rows(blocks[1], table.lives[blocks[1]], 0, 0, 4)


def test_a_poisoned_block_stays_until_the_last_of_several_saves_has_ended() -> None:
    table, blocks, _ = make()
    for layer in range(SHAPE.num_layers):
        table.begin_save(save_id(layer), layer, 0, tuple(blocks), (4,) * COUNT)
    table.abandon(blocks[0], OWNER, 0, 100)
    for layer in range(SHAPE.num_layers):
        assert table.state[blocks[0]] == BlockState.POISONED
        table.end_save(save_id(layer), True)
    assert table.state[blocks[0]] == BlockState.RESET
    assert (table.owned[OWNER], table.saving) == (set(blocks[1:]), {})


@pytest.mark.parametrize("common", [True, False], ids=["pins in common", "pins that differ"])
def test_loads_keep_blocks_and_leave_no_trace(common: bool) -> None:
    table, blocks, _ = make()
    if not common:
        table.pin(blocks[1], OTHER)
    before = dict(table.pins)
    for serial in range(2):
        table.begin_load(load_id(serial), 0, 0, tuple(blocks))
    for block in blocks:
        table.unpin(block, OWNER)
        assert {load_id(0), load_id(1)} <= table.pins[block]
        table.pin(block, OWNER)
    for serial in range(2):
        table.end_load(load_id(serial))
        table.end_load(load_id(serial))
    assert (table.pins, table.span_loads, table.load_blocks) == (before, {}, {})


def test_a_load_that_alone_keeps_blocks_frees_them_with_its_end() -> None:
    table, blocks, _ = make()
    table.begin_load(load_id(0), 0, 0, tuple(blocks))
    for block in blocks:
        table.abandon(block, OWNER, 0, 100)
        assert table.state[block] == BlockState.POISONED
    table.end_load(load_id(0))
    assert [table.state[block] for block in blocks] == [BlockState.RESET] * COUNT
    assert OWNER not in table.owned
