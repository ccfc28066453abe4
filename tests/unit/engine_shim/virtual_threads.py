"""The real pipeline in virtual time: its threads take turns, and time passes when all of them wait.

One *party* runs at any moment. When it waits, the baton goes to the first party that can go on; if
there is none, the device's clock is stepped until there is one. So a run is deterministic, threads
cost no time, and only copies and `Baton.spend` do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import tests.unit.engine_shim.fake_kvd as fake_kvd
from engine_shim import copy_order, copy_threads, loader, pipeline, saver, steps
from engine_shim.client import tickets
from engine_shim.device_virtual import VirtualDevice

DEADLOCK_NS = 10**15
HAND_OVER_S = 30.0


class SharedDevice(VirtualDevice):
    """A virtual device that any thread may drive: only one runs at a time."""

    def check(self, what: str, *, waits: bool = False) -> None:
        self._thread = threading.get_ident()
        super().check(what, waits=waits)


class Party:
    """A thread: what it waits for, and until when (virtual ns)."""

    def __init__(self) -> None:
        self.done: Callable[[], bool] = lambda: True
        self.end = DEADLOCK_NS
        self.is_over = False


class Baton:
    """Whose turn it is; the thread that makes it is the first party."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._passed = threading.Condition()
        self._parties = [Party()]
        self._running = self._parties[0]

    def now(self) -> int:
        return self._device.now_ns()

    def spend(self, ns: int) -> None:
        """Let so much time pass for this party."""
        self._wait(lambda: False, ns)

    def wait(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until done(), at most so long; returns whether it is."""
        return self._wait(done, None if seconds is None else int(seconds * 1e9))

    def _wait(self, done: Callable[[], bool], ns: int | None) -> bool:
        if done():
            return True
        me = self._running
        me.done, me.end = done, DEADLOCK_NS
        if ns is not None:
            me.end = self.now() + ns
            self._device.call_later(ns, lambda: None)
        self._pass_on()
        with self._passed:
            assert self._passed.wait_for(lambda: self._running is me, HAND_OVER_S)
        return done()

    def spawn(self, run: Callable[[], None]) -> Party:
        """Start a party; it runs when its turn comes."""
        party = Party()
        self._parties.append(party)

        def work() -> None:
            with self._passed:
                assert self._passed.wait_for(lambda: self._running is party, HAND_OVER_S)
            try:
                run()
            finally:
                party.is_over = True
                self._pass_on()

        threading.Thread(target=work, daemon=True).start()
        return party

    def _next(self) -> Party | None:
        now = self.now()
        for party in self._parties:
            if not party.is_over and (now >= party.end or party.done()):
                return party
        return None

    def _pass_on(self) -> None:
        found = self._device.run_until(lambda: self._next() is not None, DEADLOCK_NS, "a wait")
        assert found, "all parties wait for each other"
        party = self._next()
        assert party is not None
        with self._passed:
            self._running = party
            self._passed.notify_all()


class Event:
    """As threading.Event."""

    def __init__(self, baton: Baton) -> None:
        self._baton, self._is_set = baton, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, seconds: float | None = None) -> bool:
        return self._baton.wait(lambda: self._is_set, seconds)


class Condition:
    """As threading.Condition; its lock is the baton."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self.lock = self

    def __enter__(self) -> None:
        """Nobody else runs."""

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""

    def notify_all(self) -> None:
        """Whoever waits looks by itself."""

    def wait(self, seconds: float | None = None) -> None:
        self._baton.wait(lambda: False, seconds)

    def wait_for(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        return self._baton.wait(done, seconds)


class Queue:
    """As queue.SimpleQueue."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        assert self._baton.wait(lambda: bool(self._items))
        return self._items.popleft()


class Thread:
    """As threading.Thread."""

    def __init__(self, baton: Baton, target: Callable[[], None]) -> None:
        self._baton, self._target = baton, target
        self._party = Party()

    def start(self) -> None:
        self._party = self._baton.spawn(self._target)

    def join(self, seconds: float) -> None:
        self._baton.wait(lambda: self._party.is_over, seconds)

    def is_alive(self) -> bool:
        return not self._party.is_over


@contextmanager
def virtual_threads(device: VirtualDevice) -> Iterator[Baton]:
    """While it is entered, pipelines and fake kvds are made of parties of one baton."""
    baton = Baton(device)
    threads = SimpleNamespace(
        Event=lambda: Event(baton),
        Condition=lambda: Condition(baton),
        Lock=threading.Lock,
        Thread=lambda target, name, daemon: Thread(baton, target),
    )
    clock = SimpleNamespace(monotonic_ns=baton.now, monotonic=lambda: baton.now() / 1e9)
    with pytest.MonkeyPatch.context() as patch:
        for module in (copy_threads, saver, steps, tickets, fake_kvd):
            patch.setattr(module, "threading", threads)
        for module in (copy_order, steps):
            patch.setattr(module, "Condition", threads.Condition)
        for module in (copy_threads, loader, pipeline, saver, steps, fake_kvd):
            patch.setattr(module, "time", clock)
        patch.setattr(copy_threads, "queue", SimpleNamespace(SimpleQueue=lambda: Queue(baton)))
        patch.setattr(steps, "Flag", lambda lock: Event(baton))
        yield baton
