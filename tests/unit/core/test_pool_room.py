"""Who may be evicted, in which order, and the room that ticks make ahead of need."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.block_types import BlockShape
from kvd.core.blocks import BlockTable
from kvd.core.errors import LocalError
from kvd.core.evictions import make_policy
from kvd.core.ids import LoadId, ReadId, RequestKey
from kvd.core.results import Found
from kvd.core.state import Settings
from kvd.store.dict_index import DictIndex
from tests.unit.core.tiny_kvd import SCHEDULER, Kvd, slot

POLICIES = ["lru", "arc"]


def key(name: int) -> bytes:
    return name.to_bytes(32)


class Pool(Kvd):
    """A machine whose pool has four blocks of one span."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.epoch = 0

    def store(self, request: str, *names: int) -> tuple[int, ...]:
        """Blocks with keys, saved and committed, kept by the request."""
        blocks = self.reserve(request, len(names))
        for block, name in zip(blocks, names, strict=True):
            self.save(self.epoch, request, block)
            self.say(se.SaveEnded(slot(self.epoch), "s", True))
            self.epoch += 1
            item = ev.CommitItem(block, key(name), 4, request)
            self.ask(ev.Committed(0, SCHEDULER, (item,)))
        return blocks

    def find(self, request: str, *names: int, pin: bool = True) -> tuple[int, ...]:
        """What a look-up finds."""
        hashes = b"".join(key(name) for name in names)
        found = self.ask(ev.LookedUp(0, SCHEDULER, request, hashes, pin=pin))
        assert isinstance(found, Found)
        return found.blocks


@pytest.mark.parametrize("eviction", POLICIES)
def test_an_operation_does_not_evict_what_it_has_just_found(eviction: str) -> None:
    pool = Pool(eviction=eviction)
    pool.store("r1", 1, 2, 3, 4)
    pool.end("r1")
    found = pool.find("r2", 1, 2)
    assert len(found) == 2
    taken = pool.reserve("r2", 2)
    assert not set(taken) & set(found)
    assert pool.find("r2", 1, 2) == found
    error = pool.ask(ev.Reserved(0, SCHEDULER, "r2", 1))
    assert isinstance(error, LocalError)
    assert error.code == "pool_full"


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_block_that_somebody_else_keeps_is_never_taken(eviction: str) -> None:
    """A load and a remote read keep a block as a request does, after its owner has left."""
    table = BlockTable(3, BlockShape(4, 1), DictIndex(), make_policy(eviction, 3))
    owner = RequestKey("p", "r1")
    blocks = table.reserve(owner, 3)
    for block in blocks:
        table.commit("p", block, (0, key(block)), 4)
        table.fills[block].tokens[0] = 4
        table.commit("p", block, (0, key(block)), 4)
    table.begin_load(LoadId(slot(0)), 0, 0, (blocks[0],))
    table.pin_span(blocks[1], 0, ReadId("t", 0, 0, 0))
    for block in blocks:
        table.abandon(block, owner, 0, 1)
    assert table.reserve(RequestKey("p", "r2"), 1) == [blocks[2]]
    with pytest.raises(LocalError, match="pool_full"):
        table.reserve(RequestKey("p", "r3"), 1)
    table.end_load(LoadId(slot(0)))
    assert table.reserve(RequestKey("p", "r3"), 1) == [blocks[0]]


@pytest.mark.parametrize("eviction", POLICIES)
def test_the_tail_of_a_request_goes_before_its_head(eviction: str) -> None:
    pool = Pool(eviction=eviction)
    pool.store("r1", 1, 2, 3, 4)
    pool.end("r1")
    pool.reserve("r2", 2)
    assert len(pool.find("r3", 1, 2, 3, 4)) == 2


def test_asking_twice_for_one_request_is_one_use() -> None:
    pool = Pool()
    pool.store("r1", 1)
    pool.end("r1")
    pool.find("r2", 1)
    pool.find("r2", 1)
    assert pool.table.policy.figures().found == 1
    pool.find("", 1, pin=False)
    assert pool.table.policy.figures().found == 1, "a question that keeps nothing is no use"


def test_a_second_copy_of_a_block_makes_the_first_the_youngest() -> None:
    """The head of its chain was evicted, so it was computed again: it will be found now."""
    pool = Pool(eviction="lru")
    first = pool.store("r1", 1, 2)
    pool.end("r1")
    assert list(pool.table.policy) == [first[1], first[0]]
    (second,) = pool.reserve("r2", 1)
    pool.ask(ev.Committed(0, SCHEDULER, (ev.CommitItem(second, key(2), 4, "r2"),)))
    assert list(pool.table.policy) == [first[0], first[1]]


# Water marks -------------------------------------------------------------------------------------


def marked(high: float, low: float) -> Pool:
    return Pool(eviction="lru", high_water=high, low_water=low)


def test_a_tick_above_high_water_evicts_down_to_low_water() -> None:
    pool = marked(0.75, 0.5)
    pool.store("r1", 1, 2, 3, 4)
    pool.end("r1")
    effects = pool.tick(1)
    assert [type(effect) for effect in effects] == [fx.ClearHeaders]
    assert len(pool.table.free) == 2
    assert len(pool.find("r2", 1, 2, 3, 4)) == 2
    counters = pool.machine.state.counters
    assert (counters["blocks_evicted"], counters["blocks_evicted_ahead"]) == (2, 2)
    pool.reserve("r2", 2)
    assert counters["blocks_evicted"] == 2, "there was room"


def test_at_high_water_nothing_is_evicted() -> None:
    pool = marked(0.75, 0.5)
    pool.store("r1", 1, 2, 3)
    pool.end("r1")
    assert pool.tick(1) == []
    assert len(pool.table.free) == 1


def test_what_is_kept_is_not_evicted_for_room() -> None:
    pool = marked(0.75, 0.5)
    pool.store("r1", 1, 2, 3, 4)
    assert pool.tick(1) == []
    pool.ask(ev.RequestEnded(0, SCHEDULER, "r1", (0,)))
    pool.tick(1)
    assert len(pool.table.free) == 1
    pool.end("r1")
    pool.tick(1)
    assert len(pool.table.free) == 2, "down to low water, though high water was left before"


def test_without_marks_only_a_reservation_evicts() -> None:
    pool = Pool()
    pool.store("r1", 1, 2, 3, 4)
    pool.end("r1")
    assert pool.tick(1) == []
    assert len(pool.table.free) == 0


def test_a_tick_evicts_a_batch_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.pool_ops.ROOM_BATCH", 1)
    pool = marked(0.75, 0.25)
    pool.store("r1", 1, 2, 3, 4)
    pool.end("r1")
    left = []
    for _ in range(5):
        pool.tick(1)
        left.append(len(pool.table.free))
    assert left == [1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("mark", "total", "above"), [(0.99, 256, 2), (0.99, 100, 1), (0.99, 99, 0), (1.0, 1 << 20, 0)]
)
def test_marks_round_to_fewer_free_blocks(mark: float, total: int, above: int) -> None:
    pool = Kvd().machine.state
    pool.settings = Settings(64 * total, high_water=mark, low_water=mark)
    made = pool.make_pool(BlockShape(4, 1), 64, b"other")
    assert (made.free_low, made.free_high) == (above, above)
