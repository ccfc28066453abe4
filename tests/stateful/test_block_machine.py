"""The block table against a dumb model: pins, spans, commits, evictions, in any interleaving.

Two engines share a pool of blocks with two layers and two shards. What a look-up would return is
checked byte for byte: every span of the block was saved with the committed count of the text that
the key stands for.
"""

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

from kvd.core.blocks import BlockState
from kvd.core.ids import RequestKey, SaveId
from tests.stateful.block_driver import (
    ENGINES,
    GRACE,
    NAMESPACE,
    REQUESTS,
    SHAPE,
    TEXTS,
    TOTAL,
    BlockDriver,
    key_of,
)
from tests.stateful.profiles import machine_settings

anything = st.integers(0, 2**16)
a_block = st.integers(0, TOTAL - 1)
a_request = st.sampled_from(REQUESTS)
a_span = st.tuples(st.integers(0, SHAPE.num_layers - 1), st.integers(0, SHAPE.num_shards - 1))
a_count = st.sampled_from([4, 4, 4, 2, 3])


class BlockMachine(RuleBasedStateMachine):
    """Whatever the order of calls, table and model agree, and no look-up returns other bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = BlockDriver()
        self.table = self.driver.table
        self.model = self.driver.model

    # Reservations

    @rule(owner=a_request, count=st.sampled_from([1, 1, 1, 2, 3, TOTAL, TOTAL + 1]))
    def reserve(self, owner: RequestKey, count: int) -> None:
        self.driver.reserve(owner, count)

    @rule(
        owner=a_request,
        text=st.sampled_from(TEXTS),
        tokens=a_count,
        commit_first=st.booleans(),
        leave=st.booleans(),
    )
    def keep_a_text(
        self, owner: RequestKey, text: str, tokens: int, commit_first: bool, leave: bool
    ) -> None:
        """The usual way from reservation to ready block, without trouble."""
        for block in self.driver.reserve(owner, 1):
            self.model.blocks[block].text = text
            if commit_first:
                self.driver.commit(owner.engine, block, tokens)
            self.driver.save_all(block, tokens)
            if not commit_first:
                self.driver.commit(owner.engine, block, tokens)
            if leave:
                self.driver.abandon(block, owner)

    @rule(owner=a_request, text=st.sampled_from(TEXTS), tokens=a_count, saving=st.booleans())
    def owner_leaves_before_its_saves_have_ended(
        self, owner: RequestKey, text: str, tokens: int, saving: bool
    ) -> None:
        """They may still come, or never."""
        for block in self.driver.reserve(owner, 1):
            self.model.blocks[block].text = text
            self.driver.commit(owner.engine, block, tokens)
            if saving:
                self.driver.begin([block], self.model.spans[0], tokens)
            self.driver.abandon(block, owner)

    @precondition(lambda self: self.driver.filling())
    @rule(pick=anything, owner=st.none() | a_request, abort=st.booleans())
    def abandon(self, pick: int, owner: RequestKey | None, abort: bool) -> None:
        block = self.driver.filling()[pick % len(self.driver.filling())]
        who = owner or self.model.blocks[block].owner
        assert who is not None
        if abort and who == self.model.blocks[block].owner:
            self.table.poison(block)
            self.model.poison(block)
        self.driver.abandon(block, who)

    @precondition(lambda self: self.driver.ready())
    @rule(pick=anything)
    def owner_leaves_ready_block(self, pick: int) -> None:
        block = self.driver.ready()[pick % len(self.driver.ready())]
        owner = self.model.blocks[block].owner
        assert owner is not None
        self.driver.abandon(block, owner)

    @rule(passes=st.sampled_from([1, GRACE - 1, GRACE]))
    def time_passes(self, passes: int) -> None:
        self.driver.now += passes
        self.table.expire_orphans(self.driver.now)
        self.model.expire(self.driver.now)

    @rule(block=a_block, rarely=st.integers(0, 5))
    def poison(self, block: int, rarely: int) -> None:
        if rarely == 5:
            self.table.poison(block)
            self.model.poison(block)

    # Saves and commits

    @precondition(lambda self: self.driver.filling())
    @rule(pick=anything, more=anything, span=a_span, count=a_count, blocks=st.integers(1, 2))
    def begin_save(
        self, pick: int, more: int, span: tuple[int, int], count: int, blocks: int
    ) -> None:
        filling = self.driver.filling()
        targets = {filling[pick % len(filling)], filling[more % len(filling)]}
        self.driver.begin(sorted(targets)[:blocks], span, count)

    @precondition(lambda self: self.driver.filling())
    @rule(pick=anything, count=a_count)
    def save_every_span(self, pick: int, count: int) -> None:
        """The usual way: all layers of all shards are saved, and end well."""
        self.driver.save_all(self.driver.filling()[pick % len(self.driver.filling())], count)

    @rule(block=a_block, span=a_span, count=st.sampled_from([-1, 0, 1, 4, 5]))
    def saves_that_may_be_refused(self, block: int, span: tuple[int, int], count: int) -> None:
        for engine in ENGINES:
            self.driver.check_save(engine, block, span, count)

    @precondition(lambda self: self.model.saves)
    @rule(pick=anything, ok=st.sampled_from([True, True, True, False]), fewer=st.booleans())
    def end_save(self, pick: int, ok: bool, fewer: bool) -> None:
        save = sorted(self.model.saves)[pick % len(self.model.saves)]
        self.driver.end(save, ok, 1 if fewer else None)

    @rule(pick=anything)
    def unknown_save_ends(self, pick: int) -> None:
        before = self.driver.picture()
        self.table.end_save(self.driver.save_id(10**6 + pick), True)
        assert self.driver.picture() == before

    @rule(pick=anything, block=a_block, tokens=a_count, engine=st.sampled_from(ENGINES))
    def commit(self, pick: int, block: int, tokens: int, engine: str) -> None:
        filling = self.driver.filling()
        if filling and pick % 4:
            block = filling[pick % len(filling)]
            owner = self.model.blocks[block].owner
            assert owner is not None
            engine = owner.engine
        self.driver.commit(engine, block, tokens)

    @precondition(lambda self: self.driver.unsaved())
    @rule(pick=anything, text=st.sampled_from(TEXTS))
    def owner_decides_otherwise(self, pick: int, text: str) -> None:
        """A private block is its owner's: before it is saved, another text may go into it.

        If the block was committed already, the owner commits it anew, before anything is saved.
        """
        block = self.driver.unsaved()[pick % len(self.driver.unsaved())]
        found = self.model.blocks[block]
        assert found.owner is not None
        found.text = text
        if found.key:
            self.driver.commit(found.owner.engine, block, found.tokens)

    @precondition(lambda self: self.driver.unsaved() and self.driver.ready())
    @rule(pick=anything, more=anything)
    def owner_decides_for_what_is_ready_elsewhere(self, pick: int, more: int) -> None:
        """The commit before it no longer counts, whatever is saved after."""
        block = self.driver.unsaved()[pick % len(self.driver.unsaved())]
        found = self.model.blocks[block]
        ready = self.model.blocks[self.driver.ready()[more % len(self.driver.ready())]]
        assert found.owner is not None
        self.driver.commit(found.owner.engine, block, ready.tokens)
        found.text = ready.text
        self.driver.commit(found.owner.engine, block, ready.tokens)
        self.driver.save_all(block, ready.tokens)

    # Steps

    @rule(picks=st.lists(anything, max_size=3), more=st.lists(anything, max_size=2))
    def step_opens(self, picks: list[int], more: list[int]) -> None:
        filling, readable = self.driver.filling(), self.driver.readable()
        if len(self.model.steps) < 3 and readable:
            targets = {filling[pick % len(filling)] for pick in picks if filling}
            sources = {readable[pick % len(readable)] for pick in more}
            self.driver.open_step(sorted(targets), sorted(sources))

    @precondition(lambda self: self.model.steps)
    @rule(pick=anything, span=a_span)
    def step_copies_before_the_table_is_told(self, pick: int, span: tuple[int, int]) -> None:
        step = sorted(self.model.steps)[pick % len(self.model.steps)]
        found = self.model.steps[step]
        if not found.closed and not any(self.driver.is_busy(b, span) for b in found.targets):
            self.model.copy_unheard(step, span)

    @precondition(lambda self: self.model.steps)
    @rule(pick=anything, span=a_span, count=a_count, refused=st.integers(0, 5))
    def step_tells_of_a_save(
        self, pick: int, span: tuple[int, int], count: int, refused: int
    ) -> None:
        step = sorted(self.model.steps)[pick % len(self.model.steps)]
        found = self.model.steps[step]
        span = sorted(found.unheard)[0] if found.unheard else span
        if refused == 5:
            found.unheard.discard(span)
            self.driver.poison_all(found.targets)
        else:
            self.driver.save_by_step(step, span, count)

    @precondition(lambda self: self.model.steps)
    @rule(pick=anything, span=a_span)
    def step_tells_of_a_load(self, pick: int, span: tuple[int, int]) -> None:
        self.driver.load_by_step(sorted(self.model.steps)[pick % len(self.model.steps)], span)

    @precondition(lambda self: self.model.steps)
    @rule(pick=anything)
    def step_closes(self, pick: int) -> None:
        self.driver.close_step(sorted(self.model.steps)[pick % len(self.model.steps)])

    @rule(owner=a_request, text=st.sampled_from(TEXTS), tokens=a_count, leave=st.booleans())
    def step_keeps_a_text(self, owner: RequestKey, text: str, tokens: int, leave: bool) -> None:
        """The usual way: every span is copied before it is told, all end well, then it closes."""
        for block in self.driver.reserve(owner, 1):
            self.model.blocks[block].text = text
            self.driver.open_step([block], [])
            step = max(self.model.steps)
            for span in self.model.spans:
                self.model.copy_unheard(step, span)
            self.driver.commit(owner.engine, block, tokens)
            if leave:
                self.driver.abandon(block, owner)
            for span in self.model.spans:
                self.driver.save_by_step(step, span, tokens)
                saves = [save for save, of in self.driver.step_of.items() if of == step]
                for save in saves:
                    assert isinstance(save, SaveId)
                    self.driver.end(save, True, None)
            life, was = self.table.lives[block], self.model.blocks[block]
            for span in self.model.spans:
                has = self.model.has_rows(block, was, span, tokens)
                assert self.table.holds_rows(block, life, *span, tokens) == has
            self.driver.close_step(step)

    # Pins

    @precondition(lambda self: self.driver.ready())
    @rule(pick=anything, request=a_request, many=st.booleans())
    def look_up(self, pick: int, request: RequestKey, many: bool) -> None:
        ready = self.driver.ready()
        block = ready[pick % len(ready)]
        found = self.model.blocks[block]
        hit = self.driver.index.prefix(NAMESPACE, key_of(found.text, found.tokens))
        assert hit == [block]
        if many:
            self.table.pin_all(hit, request)
        else:
            self.table.pin(block, request)
        self.model.pin(block, request)

    @rule(block=a_block, request=a_request)
    def unpin(self, block: int, request: RequestKey) -> None:
        found = self.model.blocks[block]
        if found.state == "filling" and found.owner == request:
            return
        self.table.unpin(block, request)
        self.model.unpin(block, request)

    @precondition(lambda self: self.driver.readable())
    @rule(pick=anything, more=anything, span=a_span)
    def load_begins(self, pick: int, more: int, span: tuple[int, int]) -> None:
        able = self.driver.readable()
        self.driver.begin_load(sorted({able[pick % len(able)], able[more % len(able)]}), span)

    @precondition(lambda self: self.model.loads)
    @rule(pick=anything)
    def load_ends(self, pick: int) -> None:
        self.driver.end_load(sorted(self.model.loads)[pick % len(self.model.loads)])

    @precondition(lambda self: self.driver.readable())
    @rule(pick=anything, layer=st.integers(0, SHAPE.num_layers - 1))
    def remote_read_begins(self, pick: int, layer: int) -> None:
        self.driver.begin_read(self.driver.readable()[pick % len(self.driver.readable())], layer)

    @precondition(lambda self: self.model.reads)
    @rule(pick=anything)
    def remote_read_ends(self, pick: int) -> None:
        self.driver.end_read(sorted(self.model.reads)[pick % len(self.model.reads)])

    @rule(block=a_block)
    def block_is_remembered(self, block: int) -> None:
        self.driver.remember(block)

    @precondition(lambda self: self.driver.remembered)
    @rule(pick=anything, span=a_span, tokens=a_count)
    def remembered_block_is_asked_for(self, pick: int, span: tuple[int, int], tokens: int) -> None:
        """Only the same life of a block counts, however alike the next one looks."""
        block, life, was = self.driver.remembered[pick % len(self.driver.remembered)]
        assert self.table.holds_rows(block, life, *span, tokens) == self.model.has_rows(
            block, was, span, tokens
        )

    @rule(block=a_block, span=a_span, tokens=a_count)
    def loads_that_may_be_refused(self, block: int, span: tuple[int, int], tokens: int) -> None:
        for owner in REQUESTS:
            self.driver.check_load(block, span, owner, tokens)

    # What holds

    @invariant()
    def table_and_model_agree(self) -> None:
        table, model = self.table, self.model
        for at, block in enumerate(model.blocks):
            assert BlockState(table.state[at]).name.lower() == block.state, f"block {at}"
            assert table.pins.get(at, set()) == block.pins, f"pins of block {at}"
        states = [block.state for block in model.blocks]
        assert table.counts == [states.count(state.name.lower()) for state in BlockState]
        assert sum(table.counts) == TOTAL
        assert sorted(table.free) == model.free()
        assert list(table.policy) == model.evictable(), "order of eviction"
        changes = table.take_changes()
        assert changes.evicted == model.evicted
        assert sorted(changes.freed) == sorted(model.freed)
        assert changes.ready == model.ready
        assert sorted(changes.poisoned) == sorted(model.poisoned)
        for told in (model.evicted, model.freed, model.ready, model.poisoned):
            told.clear()

    @invariant()
    def what_is_written_or_pinned_is_kept(self) -> None:
        """R11: neither free, nor evictable, nor anybody else's."""
        kept = {block for opened in self.model.saves.values() for block in opened.counts}
        kept |= {at for at, block in enumerate(self.model.blocks) if block.pins}
        kept |= {block for step in self.model.steps.values() for block in step.targets}
        for step in self.model.steps.values():
            assert all(
                self.model.blocks[at].state in ("filling", "poisoned") for at in step.targets
            )
        assert not kept & set(self.table.free)
        assert not kept & set(self.table.policy)

    @invariant()
    def no_look_up_returns_other_bytes(self) -> None:
        found = 0
        for text in TEXTS:
            for tokens in (2, 3, 4):
                block = self.driver.index.get(NAMESPACE, key_of(text, tokens))
                if block is None:
                    continue
                found += 1
                memory = self.model.blocks[block].memory
                assert self.model.blocks[block].state == "ready"
                for span in self.model.spans:
                    assert memory[span] == (text, tokens), f"{text} in block {block}, span {span}"
        assert found == len(self.driver.index)


@pytest.mark.slow
def test_no_interleaving_returns_other_bytes_or_frees_what_is_kept() -> None:
    run_state_machine_as_test(BlockMachine, settings=machine_settings(400, 50))
