"""Flags: whoever waits is woken, however many they are, and nobody is woken before."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from engine_shim.flags import Flag

LONG_S = 10.0


def made() -> Flag:
    return Flag(threading.Lock())


def test_nobody_is_woken_before_it_is_set() -> None:
    flag = made()
    assert not flag.is_set()
    assert [flag.wait(0.0), flag.wait(0.01)] == [False, False]
    flag.set()
    flag.set()
    assert flag.is_set()
    assert [flag.wait(0.0), flag.wait(LONG_S)] == [True, True]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_all_who_wait_are_woken(count: int) -> None:
    flag, ready = made(), threading.Barrier(count + 1)

    def wait() -> bool:
        ready.wait(LONG_S)
        return flag.wait(LONG_S)

    with ThreadPoolExecutor(count) as pool:
        waits = [pool.submit(wait) for _ in range(count)]
        ready.wait(LONG_S)
        assert not flag.wait(0.02), "some of them sleep by now"
        flag.set()
        assert all(one.result(LONG_S) for one in waits)


def test_who_gave_up_keeps_nobody_asleep() -> None:
    flag = made()
    with ThreadPoolExecutor(3) as pool:
        given_up = [pool.submit(flag.wait, 0.01) for _ in range(2)]
        assert [one.result(LONG_S) for one in given_up] == [False, False]
        waits = pool.submit(flag.wait, LONG_S)
        assert not flag.wait(0.01)
        flag.set()
        assert waits.result(LONG_S)


def test_flags_that_share_a_lock_are_set_one_by_one() -> None:
    lock = threading.Lock()
    one, other = Flag(lock), Flag(lock)
    one.set()
    assert [one.wait(0.0), other.wait(0.01)] == [True, False]


class SetBefore:
    """A lock in front of which a flag is set by somebody else, once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.flag: Flag | None = None

    def __enter__(self) -> None:
        flag, self.flag = self.flag, None
        if flag is not None:
            flag.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_it_is_not_slept_on_when_it_was_set_in_the_last_moment() -> None:
    lock = SetBefore()
    flag = Flag(cast(threading.Lock, lock))
    lock.flag = flag
    awake = threading.Event()

    def wait() -> None:
        if flag.wait(3 * LONG_S):
            awake.set()

    threading.Thread(target=wait, daemon=True).start()
    assert awake.wait(LONG_S)


def test_it_may_be_set_while_others_begin_to_wait() -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in range(300):
            flag, ready = made(), threading.Barrier(4)

            def enter(sets: bool, flag: Flag = flag, ready: threading.Barrier = ready) -> bool:
                ready.wait(LONG_S)
                if sets:
                    flag.set()
                return flag.wait(LONG_S)

            entered = [pool.submit(enter, at == 0) for at in range(4)]
            assert all(one.result(LONG_S) for one in entered)
