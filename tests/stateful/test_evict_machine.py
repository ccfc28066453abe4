"""Eviction orders and prefix index against lists and dicts that anybody can check by eye."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.block_queues import BlockQueues
from kvd.core.evict import LruPolicy
from kvd.core.evict_arc import FINE, FLOOR, GHOSTS, NEW, USED, ArcPolicy
from kvd.core.ghosts import Ghosts
from kvd.core.prefix import HASH_BYTES, BlockIndex
from kvd.store.dict_index import DictIndex
from kvd.store.native_index import NativeIndex
from kvd.store.native_queues import NativeQueues
from tests.stateful.profiles import machine_settings

a_block = st.integers(0, 5)
an_order = st.tuples(st.sampled_from(["admit", "withdraw", "evict", "withdraw some"]), a_block)
a_name = st.sampled_from("abcdef")
a_change = st.tuples(st.sampled_from(["put", "put", "put", "remove"]), st.integers(0, 1), a_name)


@pytest.mark.slow
@pytest.mark.parametrize("queues", [BlockQueues, NativeQueues])
@given(orders=st.lists(an_order, max_size=40))
@machine_settings(200, 1)
def test_victim_is_always_the_block_admitted_longest_ago(
    queues: type[BlockQueues], orders: list[tuple[str, int]]
) -> None:
    policy = LruPolicy(8, queues)
    waiting: list[int] = []
    for order, block in orders:
        if order == "evict":
            victim = policy.victim()
            assert victim == (waiting[0] if waiting else None)
            if victim is None:
                continue
            block = victim
        gone = {block, (block + 3) % 6} if order == "withdraw some" else {block}
        if order == "admit":
            policy.admit(block)
        elif order == "withdraw some":
            policy.withdraw_all(sorted(gone))
        else:
            policy.withdraw(block)
        waiting = [other for other in waiting if other not in gone]
        waiting += [block] if order == "admit" else []
        assert list(policy) == waiting
        assert len(policy) == len(waiting)


class ArcModel:
    """Adaptive replacement as lists: two orders, two memories, and the room in parts of a block."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.key: dict[int, int] = {}
        self.used: set[int] = set()
        self.order: tuple[list[int], list[int]] = ([], [])
        self.gone: tuple[list[int], list[int]] = ([], [])
        self.room = max(FINE, FINE * total // FLOOR)

    def born(self, block: int, key: int) -> None:
        self.key[block] = key
        self.used.discard(block)
        for queue in (NEW, USED):
            if key not in self.gone[queue]:
                continue
            self.used.add(block)
            self.forget(queue, key)
            # As many steps as the other memory is longer: the rarer news weighs more.
            step = FINE * self.remembered(1 - queue) // (1 + self.remembered(queue))
            change = max(FINE, step) * (1 if queue == NEW else -1)
            low, high = max(FINE, FINE * self.total // FLOOR), FINE * self.total
            self.room = min(high, max(low, self.room + change))
            return

    def admit(self, block: int) -> None:
        self.withdraw(block)
        self.order[USED if block in self.used else NEW].append(block)

    def withdraw(self, block: int) -> None:
        for order in self.order:
            if block in order:
                order.remove(block)

    def found(self, block: int) -> None:
        self.used.add(block)
        if block in self.order[NEW] + self.order[USED]:
            self.admit(block)

    def expected(self) -> list[int]:
        """All in order of eviction, if nothing is learned meanwhile."""
        new, used = list(self.order[NEW]), list(self.order[USED])
        out = []
        while new or used:
            out.append((new if new and (FINE * len(new) > self.room or not used) else used).pop(0))
        return out

    def evict(self, block: int) -> None:
        queue = NEW if block in self.order[NEW] else USED
        self.withdraw(block)
        key = self.key.pop(block)
        self.forget(queue, key)
        self.gone[queue].append(key)
        del self.gone[queue][: -GHOSTS * self.total]

    def forget(self, queue: int, key: int) -> None:
        """Its place is not another's before its time is over."""
        memory = self.gone[queue]
        if key in memory:
            memory[memory.index(key)] = -1

    def remembered(self, queue: int) -> int:
        return sum(1 for key in self.gone[queue] if key >= 0)


ARC_TOTAL = 6
NAMES = range(10)
ORDERS = ["store", "store", "store", "use", "find", "pin", "let go", "evict", "evict", "evict"]
a_choice = st.tuples(st.sampled_from(ORDERS), st.integers(0, 59))


@pytest.mark.slow
@given(orders=st.lists(a_choice, min_size=20, max_size=80))
@machine_settings(300, 1)
def test_adaptive_replacement_is_two_lists_and_two_memories(orders: list[tuple[str, int]]) -> None:
    policy, model = ArcPolicy(ARC_TOTAL), ArcModel(ARC_TOTAL)
    for order, pick in orders:
        waiting = model.expected()
        some = waiting[pick % len(waiting)] if waiting else None
        victim = policy.victim()
        assert victim == next(iter(waiting), None)
        if order == "store":
            store_one(policy, model, pick)
        elif order == "evict" and victim is not None:
            policy.evict(victim, 0, key_of(model.key[victim]))
            model.evict(victim)
        elif order == "let go":
            for block in sorted(set(model.key) - set(waiting))[:1]:
                policy.admit(block)
                model.admit(block)
        elif order in ("use", "pin") and some is not None:
            policy.withdraw(some)
            model.withdraw(some)
            policy.found([some])
            model.found(some)
            if order == "use":
                policy.admit(some)
                model.admit(some)
        elif order == "find" and some is not None:
            policy.found([some])
            model.found(some)
        assert list(policy) == model.expected()
        seen = policy.figures()
        assert (seen.new, seen.used) == tuple(map(len, model.order))
        assert seen.new_room == model.room // FINE


def store_one(policy: ArcPolicy, model: ArcModel, pick: int) -> None:
    """A key that is in no block gets a free one, if there is any; nobody keeps it."""
    free = [block for block in range(ARC_TOTAL) if block not in model.key]
    absent = [name for name in NAMES if name not in model.key.values()]
    if free:
        block, name = free[pick % len(free)], absent[pick % len(absent)]
        policy.born(block, 0, key_of(name))
        model.born(block, name)
        policy.admit(block)
        model.admit(block)


def key_of(name: int) -> bytes:
    """A hash; small ones collide in every table."""
    return name.to_bytes(4, "little") * 8


a_print = st.sampled_from([1, 2, 3, 9, 17, 33, 1 << 31, (1 << 31) + 1])


@pytest.mark.slow
@given(
    capacity=st.integers(1, 5),
    orders=st.lists(st.tuples(st.booleans(), a_print), max_size=60),
)
@machine_settings(300, 1)
def test_exactly_the_last_evicted_keys_are_remembered(
    capacity: int, orders: list[tuple[bool, int]]
) -> None:
    ghosts = Ghosts(capacity)
    places: list[int] = []
    for is_added, print_ in orders:
        if is_added:
            places = [0 if other == print_ else other for other in places]
            places = [*places, print_][-capacity:]
            ghosts.add(print_)
        else:
            assert ghosts.take(print_) == (print_ in places)
            places = [0 if other == print_ else other for other in places]
        assert len(ghosts) == sum(1 for other in places if other)
    for print_ in (1, 2, 3, 9, 17, 33, 1 << 31, (1 << 31) + 1):
        assert ghosts.take(print_) == (print_ in places)


def hash_of(name: str) -> bytes:
    """A block hash, chained as engines chain them is of no matter here."""
    return name.encode() * HASH_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("make", [DictIndex, NativeIndex])
@given(changes=st.lists(a_change, max_size=30), wanted=st.text("abcdef", max_size=6))
@machine_settings(200, 1)
def test_prefix_is_the_longest_run_of_known_leading_hashes(
    make: Callable[[], BlockIndex], changes: list[tuple[str, int, str]], wanted: str
) -> None:
    index = make()
    index.clear(12)
    known: dict[tuple[int, str], int] = {}
    for serial, (change, namespace, name) in enumerate(changes):
        if change == "put" and (namespace, name) not in known:
            index.put(namespace, hash_of(name), serial)
            known[namespace, name] = serial
        elif change == "remove" and (namespace, name) in known:
            index.remove(namespace, hash_of(name))
            del known[namespace, name]
    assert len(index) == len(known)
    for namespace in (0, 1, 2):
        run: list[int] = []
        for name in wanted:
            if (namespace, name) not in known:
                break
            run.append(known[namespace, name])
        assert index.prefix(namespace, b"".join(map(hash_of, wanted))) == run
        for name in "abcdef":
            assert index.get(namespace, hash_of(name)) == known.get((namespace, name))
    index.clear()
    assert len(index) == 0
    assert index.prefix(0, hash_of("a")) == []
