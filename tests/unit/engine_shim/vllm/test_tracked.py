"""Names and keys of a request in kvd."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_shim.vllm.tracked import NAME_CHARS_MAX, BlockKeys, Tracked

NAME_LIMIT = 256


def named(request_id: str, attempt: int = 0) -> str:
    request = SimpleNamespace(request_id=request_id)
    return Tracked(request, BlockKeys([], 1), attempt).name


def digests(count: int, size: int = 32) -> list[bytes]:
    return [bytes([at]) * size for at in range(count)]


def test_the_last_hash_within_a_block_is_its_key() -> None:
    keys = BlockKeys(digests(7), 2)
    assert len(keys) == 3
    assert [key[0] for key in keys] == [1, 3, 5]
    assert [key[0] for key in keys[1:]] == [3, 5]
    assert list(keys[:0]) == []
    assert [key[0] for key in keys[:99]] == [1, 3, 5]


def test_keys_grow_with_the_engine_s_hashes() -> None:
    hashes = digests(3)
    keys = BlockKeys(hashes, 2)
    assert len(keys) == 1
    hashes.extend(digests(1))
    assert len(keys) == 2


@pytest.mark.parametrize("at", [-1, 3, 99])
def test_a_block_that_is_not_full_has_no_key(at: int) -> None:
    with pytest.raises(IndexError):
        BlockKeys(digests(7), 2)[at]


@pytest.mark.parametrize("size", [8, 16, 64])
def test_hashes_of_another_length_are_hashed(size: int) -> None:
    (found,) = BlockKeys(digests(1, size), 1)
    assert found == hashlib.sha256(bytes(size)).digest()


def test_the_first_attempt_has_the_engine_s_name() -> None:
    assert named("cmpl-7") == "cmpl-7"
    assert named("cmpl-7", 2) == "cmpl-7~2"


@pytest.mark.parametrize("extra", [-1, 0, 1, 1000])
@pytest.mark.parametrize("attempt", [0, 123456])
def test_long_names_fit_and_stay_apart(extra: int, attempt: int) -> None:
    size = NAME_CHARS_MAX + extra
    one, other = named("x" * size, attempt), named("x" * (size - 1) + "y", attempt)
    assert one != other
    assert max(len(one), len(other)) <= NAME_LIMIT


ids = st.text(alphabet="a1~", min_size=1, max_size=6)
attempts = st.integers(0, 12)


@given(ids, attempts, ids, attempts)
@example("a", 1, "a~1", 0)
def test_no_two_attempts_have_one_name(a: str, m: int, b: str, n: int) -> None:
    """Else the end of one would unpin the blocks of the other."""
    assert (named(a, m) == named(b, n)) == ((a, m) == (b, n))


def test_the_first_refusal_begins_the_wait() -> None:
    tracked = Tracked(SimpleNamespace(request_id="r"), BlockKeys([], 1))
    assert tracked.waited() == 0.0
    assert tracked.waits_since > 0.0
    assert tracked.waited() >= 0.0
