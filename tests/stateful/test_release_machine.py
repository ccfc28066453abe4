"""The release rule in a world with real copies, lost and repeated letters, deaths and time."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd.core import slot_events as ev
from kvd.core.holds import Timing
from kvd.core.slot import Rules
from tests.stateful.dma_parts import Letter, Reader
from tests.stateful.dma_world import DmaWorld
from tests.stateful.profiles import machine_settings

SLOTS = 2
READERS = ("kvd#d", "kvd#e")
RULES = Rules(
    Timing(
        compute=600, save=200, offer=100, read=50, interval=10, query_attempts=2, read_attempts=2
    ),
    max_readers=4,
)
ROUNDS_MAX = 24

anything = st.integers(0, 2**16)


class ReleaseMachine(RuleBasedStateMachine):
    """Whatever happens: nobody touches memory without a hold, and in peace all slots get free."""

    def __init__(self) -> None:
        super().__init__()
        self.world = DmaWorld(SLOTS, READERS, RULES)

    # The engine

    @precondition(lambda self: any(map(self.world.can_acquire, range(SLOTS))))
    @rule(pick=anything)
    def acquire(self, pick: int) -> None:
        able = [index for index in range(SLOTS) if self.world.can_acquire(index)]
        self.world.acquire(able[pick % len(able)])

    @precondition(lambda self: any(map(self.world.can_acquire, range(SLOTS))))
    @rule(pick=anything, savers=st.integers(0, 2), reads=st.integers(1, 3))
    def whole_step(self, pick: int, savers: int, reads: int) -> None:
        """A step without trouble up to the end of its computation: most of them are so."""
        able = [index for index in range(SLOTS) if self.world.can_acquire(index)]
        index = able[pick % len(able)]
        self.world.acquire(index)
        self.world.write(index, savers, reads)
        if pick % 3:
            self.world.compute_end(index, True)
        while self.world.own:
            self.world.deliver_own()
        for saver in sorted(self.world.tenancies[index].may_save):
            self.world.save_begin(index, saver)
        if pick % 2:
            self.first_letters_arrive()

    @precondition(lambda self: self._computing(written=False))
    @rule(pick=anything, savers=st.integers(0, 2), reads=st.integers(0, 3))
    def write(self, pick: int, savers: int, reads: int) -> None:
        able = self._computing(written=False)
        self.world.write(able[pick % len(able)], savers, reads)

    @precondition(lambda self: self._computing(written=True))
    @rule(pick=anything, ok=st.booleans())
    def compute_end(self, pick: int, ok: bool) -> None:
        able = self._computing(written=True)
        self.world.compute_end(able[pick % len(able)], ok)

    @precondition(lambda self: self._may_save())
    @rule(pick=anything)
    def save_begin(self, pick: int) -> None:
        able = self._may_save()
        self.world.save_begin(*able[pick % len(able)])

    @precondition(lambda self: self._saving())
    @rule(pick=anything, ok=st.booleans(), heard=st.booleans())
    def save_end(self, pick: int, ok: bool, heard: bool) -> None:
        able = self._saving()
        self.world.save_end(*able[pick % len(able)], ok)
        while heard and self.world.own:
            self.world.deliver_own()

    @precondition(lambda self: self.world.tenancies)
    @rule(pick=anything, rarely=st.integers(0, 6))
    def rows_are_bad(self, pick: int, rarely: int) -> None:
        able = sorted(self.world.tenancies)
        if rarely == 6:
            self.world.poison(able[pick % len(able)])

    @precondition(lambda self: self.world.member_alive)
    @rule(rarely=st.integers(0, 60))
    def member_dies(self, rarely: int) -> None:
        if rarely == 60:
            self.world.member_dies()

    # Readers

    @precondition(lambda self: self._copying())
    @rule(pick=anything, ok=st.booleans())
    def read_end(self, pick: int, ok: bool) -> None:
        able = self._copying()
        reader = able[pick % len(able)]
        keys = sorted(reader.copies)
        self.world.read_end(reader, keys[pick % len(keys)], ok)

    @precondition(lambda self: self._claiming())
    @rule(pick=anything)
    def claim_again(self, pick: int) -> None:
        able = self._claiming()
        reader = able[pick % len(able)]
        keys = sorted(reader.claims)
        self.world.claim(reader, *keys[pick % len(keys)])

    @precondition(lambda self: self._copying())
    @rule(pick=anything, rarely=st.integers(0, 4), known=st.booleans())
    def reader_dies(self, pick: int, rarely: int, known: bool) -> None:
        """Its death may be proven at once, or only long after."""
        able = self._copying()
        reader = able[pick % len(able)]
        if rarely == 4:
            self.world.reader_dies(reader)
            if known:
                self.world.report_death(reader)

    # The post

    @precondition(lambda self: self.world.own)
    @rule()
    def member_is_heard(self) -> None:
        self.world.deliver_own()

    @precondition(lambda self: self.world.post)
    @rule(pick=anything)
    def letter_arrives(self, pick: int) -> None:
        post = self.world.post
        self.world.deliver(post.pop(pick % len(post)))

    @precondition(lambda self: self.world.post)
    @rule()
    def first_letters_arrive(self) -> None:
        post, self.world.post = self.world.post, []
        for letter in post:
            self.world.deliver(letter)

    @precondition(lambda self: self.world.post)
    @rule(pick=anything)
    def letter_is_lost(self, pick: int) -> None:
        post = self.world.post
        self.world.past.append(post.pop(pick % len(post)))

    @precondition(lambda self: self.world.past)
    @rule(pick=anything)
    def old_letter_comes_again(self, pick: int) -> None:
        past = self.world.past
        letter = past[len(past) - 1 - pick % len(past)]
        self.world.deliver(letter)

    @precondition(lambda self: self._completions())
    @rule(pick=anything)
    def old_completion_comes_again(self, pick: int) -> None:
        past = self._completions()
        self.world.deliver(past[len(past) - 1 - pick % len(past)])

    @precondition(lambda self: self.world.post)
    @rule()
    def everything_on_its_way_is_lost(self) -> None:
        self.world.past += self.world.post
        self.world.post.clear()

    @rule(passes=st.sampled_from([1, 9, 10, 10, 10, 10, 40, 50, 50, 90, 200, 700]))
    def tick(self, passes: int) -> None:
        self.world.now += passes
        for slot in list(self.world.slots):
            self.world.feed(ev.Ticked(slot.ref))

    # What holds

    @invariant()
    def nobody_touches_without_a_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Liveness: once the faults stop, every slot is free and every read over, in time."""
        held = self.world.settle_down(ROUNDS_MAX)
        assert not held, f"still held after {ROUNDS_MAX} rounds of peace: {held}"
        assert not self.world.forgotten(), "reads without an end"
        self.world.check()

    def _computing(self, *, written: bool) -> list[int]:
        return [
            index
            for index, tenancy in self.world.tenancies.items()
            if tenancy.computing and tenancy.written is written
        ]

    def _may_save(self) -> list[tuple[int, str]]:
        items = self.world.tenancies.items()
        return [(index, saver) for index, t in items for saver in sorted(t.may_save)]

    def _saving(self) -> list[tuple[int, str]]:
        items = self.world.tenancies.items()
        return [(index, saver) for index, t in items for saver in t.saving]

    def _completions(self) -> list[Letter]:
        ends = ev.SaveEnded | ev.ReadEnded | ev.Answered | ev.Fenced
        return [letter for letter in self.world.past if isinstance(letter.what, ends)]

    def _copying(self) -> list[Reader]:
        return [reader for reader in self.world.readers.values() if reader.copies]

    def _claiming(self) -> list[Reader]:
        return [reader for reader in self.world.readers.values() if reader.claims]


def test_answer_that_comes_late_cannot_free_a_slot_that_is_read() -> None:
    """The grant got lost, the reader said "never started", and then was offered the read again."""
    world = DmaWorld(1, READERS[:1], RULES)
    reader = world.readers[READERS[0]]
    world.acquire(0)
    world.write(0, savers=0, reads=1)
    world.compute_end(0, ok=True)
    while world.own:
        world.deliver_own()
    offer = world.post.pop()
    world.deliver(offer)
    world.deliver(world.post.pop())
    lost_grant = world.post.pop()
    assert isinstance(lost_grant.what, ev.GrantRead)

    world.now += RULES.timing.read
    world.feed(ev.Ticked(world.slots[0].ref))
    world.deliver(world.post.pop())
    answer = world.post.pop()
    assert isinstance(answer.what, ev.Answered)

    world.deliver(offer)
    world.deliver(world.post.pop())
    for letter in [letter for letter in world.post if letter.to == reader.name]:
        world.deliver(letter)
    world.deliver(answer)
    world.check()
    assert world.settle_down(ROUNDS_MAX) == []


@pytest.mark.slow
def test_no_story_corrupts_memory_or_keeps_a_slot_shut() -> None:
    run_state_machine_as_test(ReleaseMachine, settings=machine_settings(600, 50))
