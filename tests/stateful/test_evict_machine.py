"""Eviction order and prefix index against lists and dicts that anybody can check by eye."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.evict import LruPolicy
from kvd.core.prefix import HASH_BYTES
from kvd.store.dict_index import DictIndex
from tests.stateful.profiles import machine_settings

a_block = st.integers(0, 5)
an_order = st.tuples(st.sampled_from(["admit", "withdraw", "evict"]), a_block)
a_name = st.sampled_from("abcdef")
a_change = st.tuples(st.sampled_from(["put", "put", "put", "remove"]), st.integers(0, 1), a_name)


@pytest.mark.slow
@given(orders=st.lists(an_order, max_size=40))
@machine_settings(200, 1)
def test_victim_is_always_the_block_admitted_longest_ago(orders: list[tuple[str, int]]) -> None:
    policy = LruPolicy()
    waiting: list[int] = []
    for order, block in orders:
        if order == "evict":
            victim = policy.victim()
            assert victim == (waiting[0] if waiting else None)
            if victim is None:
                continue
            block = victim
        if order == "admit":
            policy.admit(block)
        else:
            policy.withdraw(block)
        waiting = [other for other in waiting if other != block]
        waiting += [block] if order == "admit" else []
        assert list(policy) == waiting
        assert len(policy) == len(waiting)


def hash_of(name: str) -> bytes:
    """A block hash, chained as engines chain them is of no matter here."""
    return name.encode() * HASH_BYTES


@pytest.mark.slow
@given(changes=st.lists(a_change, max_size=30), wanted=st.text("abcdef", max_size=6))
@machine_settings(200, 1)
def test_prefix_is_the_longest_run_of_known_leading_hashes(
    changes: list[tuple[str, int, str]], wanted: str
) -> None:
    index = DictIndex()
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
