"""Adaptive replacement by example; `tests/stateful/test_evict_machine.py` has a model of it."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.core.evict_arc import FLOOR, ArcPolicy

TOTAL = 32


def key(name: int) -> bytes:
    return name.to_bytes(4, "little") * 8


def store(policy: ArcPolicy, blocks: Iterable[int], first_key: int = 0) -> None:
    """Blocks get keys, nobody keeps them: block b has key first_key + b."""
    for block in blocks:
        policy.born(block, 0, key(first_key + block))
        policy.admit(block)


def use(policy: ArcPolicy, *blocks: int) -> None:
    """A request finds blocks, keeps them and lets go."""
    for block in blocks:
        policy.withdraw(block)
    policy.found(list(blocks))
    for block in blocks:
        policy.admit(block)


def evict(policy: ArcPolicy, count: int, first_key: int = 0) -> list[int]:
    gone = []
    for _ in range(count):
        block = policy.victim()
        assert block is not None
        policy.evict(block, 0, key(first_key + block))
        gone.append(block)
    return gone


def test_nothing_to_evict_is_none_and_no_error() -> None:
    policy = ArcPolicy(TOTAL)
    policy.withdraw(7)
    assert policy.victim() is None
    assert len(policy) == 0
    assert list(policy) == []


def test_a_scan_leaves_what_was_found_again() -> None:
    policy = ArcPolicy(TOTAL)
    store(policy, range(8))
    use(policy, 0, 1, 2, 3)
    store(policy, range(8, TOTAL))
    scanned = evict(policy, 26)
    assert not {0, 1, 2, 3} & set(scanned)
    assert scanned == [4, 5, 6, 7, *range(8, 30)]


def test_new_blocks_keep_a_floor_and_used_ones_go_by_last_use() -> None:
    policy = ArcPolicy(TOTAL)
    store(policy, range(10))
    use(policy, 3, 1, 2)
    floor = TOTAL // FLOOR
    evict(policy, 7 - floor)
    assert policy.figures().new == floor
    assert evict(policy, 3) == [3, 1, 2]
    assert evict(policy, floor) == [8, 9]


def test_a_key_that_comes_back_is_used_and_its_queue_gets_room() -> None:
    policy = ArcPolicy(TOTAL)
    store(policy, range(TOTAL))
    evict(policy, 8)
    before = policy.figures()
    assert (before.ghost_hits, before.new_room) == (0, TOTAL // FLOOR)
    store(policy, range(4))
    seen = policy.figures()
    assert (seen.ghost_hits, seen.used, seen.new_room) == (4, 4, TOTAL // FLOOR + 4)
    use(policy, *range(4, 8))
    assert policy.figures().ghost_hits == 4


def test_a_used_key_that_comes_back_takes_room_from_new_ones() -> None:
    policy = ArcPolicy(TOTAL)
    store(policy, range(TOTAL))
    evict(policy, 8)
    store(policy, range(8))
    room = policy.figures().new_room
    use(policy, *range(8, TOTAL))
    gone = evict(policy, 8)
    assert gone == list(range(8)), "used, and longest ago"
    store(policy, gone)
    assert policy.figures().new_room < room


def test_a_key_counts_in_its_own_namespace_only() -> None:
    policy = ArcPolicy(TOTAL)
    store(policy, range(TOTAL))
    evict(policy, 4)
    policy.born(0, 1, key(0))
    assert policy.figures().ghost_hits == 0
    policy.born(1, 0, key(0))
    assert policy.figures().ghost_hits == 1


def test_a_new_life_of_a_block_does_not_inherit_the_uses_of_the_last() -> None:
    policy = ArcPolicy(TOTAL)
    store(policy, range(3))
    use(policy, 0, 1, 2)
    evict(policy, 3)
    store(policy, range(3), first_key=1000)
    assert policy.figures().new == 3


def test_what_is_found_while_it_waits_becomes_the_youngest() -> None:
    policy = ArcPolicy(TOTAL)
    store(policy, range(6))
    use(policy, 4, 5)
    policy.found([4])
    assert policy.figures().used == 2
    evict(policy, 4 - TOTAL // FLOOR)
    assert evict(policy, 2) == [5, 4]


def test_a_pool_of_one_block_works() -> None:
    policy = ArcPolicy(1)
    for name in range(5):
        store(policy, [0], first_key=name)
        assert evict(policy, 1, first_key=name) == [0]
    assert policy.figures().ghost_hits == 0


def test_blocks_of_an_earlier_life_are_new_until_they_are_found() -> None:
    policy = ArcPolicy(TOTAL)
    policy.admit_range(4, 20)
    assert list(policy) == list(range(4, 20))
    policy.withdraw_all([5, 6])
    policy.found([5, 6])
    for block in (5, 6):
        policy.admit(block)
    assert (policy.figures().new, policy.figures().used) == (14, 2)
