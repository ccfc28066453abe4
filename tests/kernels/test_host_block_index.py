"""BlockIndex: refusals, and any history of puts and removals against the reference."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_kernels import reference
from kvd_kernels.host import BlockIndex

U32_MAX = 2**32 - 1
CAPACITY = 6  # eight slots: every key has neighbours, and runs go over the end


def hash_of(number: int) -> bytes:
    """A hash like any other."""
    return random.Random(number).randbytes(32)


@pytest.mark.parametrize("capacity", [-1, 2**31 + 1, 2**70])
def test_a_capacity_out_of_range_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity is {capacity} but must be 0 to 2147483648"):
        BlockIndex(capacity)


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_hash_of_another_length_is_refused(length: int) -> None:
    index = BlockIndex(1)
    calls: list[Callable[[], object]] = [
        lambda: index.get(0, bytes(length)),
        lambda: index.put(0, bytes(length), 0),
        lambda: index.remove(0, bytes(length)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"block_hash must have 32 bytes, not {length}"):
            call()
    assert len(index) == 0


def test_hashes_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="hashes has 63 bytes, which is not a multiple of 32"):
        BlockIndex(1).prefix(0, bytes(63))


@pytest.mark.parametrize("namespace", [-1, 2**32])
def test_a_namespace_that_is_no_u32_is_refused(namespace: int) -> None:
    index = BlockIndex(1)
    with pytest.raises(ValueError, match=f"namespace is {namespace} but must be 0 to {U32_MAX}"):
        index.put(namespace, bytes(32), 0)
    with pytest.raises(ValueError, match=f"namespace is {namespace} but must be 0 to {U32_MAX}"):
        index.prefix(namespace, b"")


@pytest.mark.parametrize("block", [-1, 2**31])
def test_a_block_out_of_range_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match=f"block is {block} but must be 0 to 2147483647"):
        BlockIndex(1).put(0, bytes(32), block)


def test_a_key_twice_is_refused_and_the_first_block_stays() -> None:
    index = BlockIndex(2)
    index.put(0, bytes(32), 1)
    with pytest.raises(ValueError, match="the key of block 2 is in the index already"):
        index.put(0, bytes(32), 2)
    assert index.get(0, bytes(32)) == 1
    assert len(index) == 1


def test_one_key_too_many_is_refused() -> None:
    index = BlockIndex(2)
    for number in range(2):
        index.put(0, hash_of(number), number)
    with pytest.raises(OverflowError, match="the index is full: it has room for 2 keys"):
        index.put(0, hash_of(2), 2)
    assert len(index) == 2
    assert index.get(0, hash_of(2)) is None


def test_removing_what_is_not_there_is_a_key_error() -> None:
    index = BlockIndex(1)
    with pytest.raises(KeyError, match="no such key in the index"):
        index.remove(0, bytes(32))


def test_the_largest_values_are_kept() -> None:
    index = BlockIndex(1)
    index.put(U32_MAX, b"\xff" * 32, 2**31 - 1)
    assert index.get(U32_MAX, b"\xff" * 32) == 2**31 - 1
    assert index.prefix(U32_MAX, bytearray(b"\xff" * 32)) == [2**31 - 1]


def test_every_byte_of_a_hash_and_its_namespace_count() -> None:
    index = BlockIndex(100)
    base = bytes(32)
    index.put(0, base, 0)
    for at in range(32):
        other = bytearray(base)
        other[at] = 1
        assert index.get(0, other) is None
        index.put(0, other, at + 1)
    assert index.get(1, base) is None
    assert len(index) == 33


def test_clear_forgets_all_and_changes_the_room() -> None:
    index = BlockIndex(2)
    index.put(0, bytes(32), 1)
    index.clear()
    assert (len(index), index.capacity, index.get(0, bytes(32))) == (0, 2, None)
    index.clear(1000)
    for number in range(1000):
        index.put(7, hash_of(number), number)
    assert index.capacity == 1000
    assert index.prefix(7, b"".join(map(hash_of, range(1000)))) == list(range(1000))
    index.clear(0)
    with pytest.raises(OverflowError):
        index.put(7, bytes(32), 1)


def test_at_most_three_quarters_of_the_slots_are_taken() -> None:
    for capacity in (0, 1, 5, 6, 7, 768, 769, 1_000_000):
        slots = BlockIndex(capacity).slot_bytes // 40
        assert capacity <= slots * 3 // 4
        assert slots & (slots - 1) == 0


A_STEP = st.tuples(
    st.sampled_from(["put", "put", "remove", "prefix", "clear"]),
    st.integers(0, 1),
    st.integers(0, 9),
)


def outcome(
    index: BlockIndex | reference.BlockIndex, step: tuple[str, int, int], block: int
) -> str:
    """What a step returns, or the name of what it raises."""
    kind, namespace, number = step
    try:
        if kind == "put":
            return str(index.put(namespace, hash_of(number), block))
        if kind == "remove":
            return str(index.remove(namespace, hash_of(number)))
        if kind == "clear":
            return str(index.clear(CAPACITY)) if number == 0 else ""
        return str(index.prefix(namespace, b"".join(hash_of(n) for n in range(number))))
    except (ValueError, KeyError, OverflowError) as error:
        return type(error).__name__


@settings(max_examples=300, deadline=None)
@given(st.lists(A_STEP, max_size=60))
def test_any_history_answers_as_the_reference(steps: list[tuple[str, int, int]]) -> None:
    index, model = BlockIndex(CAPACITY), reference.BlockIndex(CAPACITY)
    for block, step in enumerate(steps):
        assert outcome(index, step, block) == outcome(model, step, block), step
        assert len(index) == len(model)
        for namespace in (0, 1):
            for number in range(10):
                wanted = model.get(namespace, hash_of(number))
                assert index.get(namespace, hash_of(number)) == wanted


def churn(index: BlockIndex, live: dict[bytes, int], rng: random.Random) -> Iterator[bytes]:
    """Replace keys one by one, without end; yields each removed key."""
    keys = list(live)
    for block in count(len(keys)):
        at = rng.randrange(len(keys))
        old, keys[at] = keys[at], rng.randbytes(32)
        del live[old]
        index.remove(3, old)
        index.put(3, keys[at], block)
        live[keys[at]] = block
        yield old


def test_a_full_index_stays_exact_however_often_its_keys_change() -> None:
    """A thousand keys in place of a thousand others, many times: nothing builds up."""
    rng = random.Random(5)
    index = BlockIndex(1536)  # of 2048 slots: as full as it gets
    live = {rng.randbytes(32): block for block in range(1536)}
    for key, block in live.items():
        index.put(3, key, block)
    changes = churn(index, live, rng)
    for _ in range(20_000):
        removed = next(changes)
    assert index.get(3, removed) is None
    assert len(index) == len(live) == 1536
    assert all(index.get(3, key) == block for key, block in live.items())


def test_load_without_room_for_all_puts_nothing() -> None:
    index = BlockIndex(2)
    index.put(0, hash_of(9), 9)
    columns = (b"\2\1\2", array("I", [0, 0, 0]), b"".join(map(hash_of, range(3))))
    with pytest.raises(ValueError, match="the index has room for 1 more keys, not for 2"):
        index.load(*columns)
    assert len(index) == 1


def test_load_refuses_columns_of_other_lengths() -> None:
    index = BlockIndex(2)
    with pytest.raises(ValueError, match="namespaces has 4 bytes, not 8"):
        index.load(b"\2\2", array("I", [0]), bytes(64))
    with pytest.raises(ValueError, match="hashes has 63 bytes, not 64"):
        index.load(b"\2\2", array("I", [0, 0]), bytes(63))
    with pytest.raises(ValueError, match="namespaces is misaligned"):
        index.load(b"\2\2", memoryview(bytes(9))[1:], bytes(64))
    assert len(index) == 0


A_BLOCK = st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 9))


@settings(max_examples=200, deadline=None)
@given(st.lists(A_BLOCK, max_size=40), st.booleans())
def test_load_puts_what_the_reference_puts(
    blocks: list[tuple[int, int, int]], some_before: bool
) -> None:
    index, model = BlockIndex(41), reference.BlockIndex(41)
    if some_before:
        index.put(1, hash_of(0), 40)
        model.put(1, hash_of(0), 40)
    states = bytes(state for state, _, _ in blocks)
    namespaces = array("I", [namespace for _, namespace, _ in blocks])
    hashes = b"".join(hash_of(number) for _, _, number in blocks)
    assert index.load(states, namespaces, hashes) == model.load(states, namespaces, hashes)
    assert len(index) == len(model)
    for namespace in (0, 1):
        for number in range(10):
            wanted = model.get(namespace, hash_of(number))
            assert index.get(namespace, hash_of(number)) == wanted
