"""What carries words between processes, and how it fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.sim.clock import MS, Clock
from tests.sim.options import Options

LATE_MAX = 600 * MS
"""Longest delay of a straggler: past every deadline of the message it belongs to."""


SLOW_RATE = 0.7
"""How often a message of a slow kind is a straggler."""


class Faults:
    """Whether faults still happen: the calm phase at the end of a run turns them off."""

    def __init__(self) -> None:
        self.on = True


class Links:
    """Links between kvds: each message may be lost, doubled, late, and overtaken by later ones."""

    def __init__(self, clock: Clock, rng: random.Random, options: Options, faults: Faults) -> None:
        self._clock = clock
        self._rng = rng
        self._options = options
        self._faults = faults
        self._deaf: dict[str, int] = {}
        self._mute: dict[str, int] = {}

    def cut(self, address: str, until: int, *, deaf: bool, mute: bool) -> None:
        """Until then lose everything to this node (deaf), and everything from it (mute)."""
        if deaf:
            self._deaf[address] = until
        if mute:
            self._mute[address] = until

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing passes from one node to the other now."""
        if source == target or not self._faults.on:
            return False
        now = self._clock.now
        return self._mute.get(source, 0) > now or self._deaf.get(target, 0) > now

    def send(self, source: str, target: str, call: Callable[..., None], *args: Any) -> None:
        """Have `call` made at the other end, so many times, at some time.

        args: the last one is the event that it becomes there.
        """
        rng, options = self._rng, self._options
        if self.is_cut(source, target):
            return
        copies = 1
        late = 0.0
        if self._faults.on:
            if rng.random() < options.loss:
                return
            copies += rng.random() < options.duplication
            slow = type(args[-1]).__name__ in options.slow_kinds
            late = SLOW_RATE if slow else options.late_rate
        for _ in range(copies):
            longest = LATE_MAX if late and rng.random() < late else options.delay_max
            self._clock.at(rng.randint(1, longest), call, *args)


class Channel:
    """One direction between a member and its kvd: in order; a message may be lost or doubled."""

    def __init__(self, clock: Clock, rng: random.Random, options: Options, faults: Faults) -> None:
        self._clock = clock
        self._rng = rng
        self._options = options
        self._faults = faults
        self._last = 0

    def send(self, call: Callable[..., None], *args: Any) -> None:
        """Have `call` made at the other end after everything that was sent before."""
        rng, options = self._rng, self._options
        copies = 1
        if self._faults.on:
            if rng.random() < options.channel_loss:
                return
            copies += rng.random() < options.channel_duplication
        now = self._clock.now
        for _ in range(copies):
            self._last = max(self._last, now + rng.randint(1, options.channel_delay))
            self._clock.at(self._last - now, call, *args)
