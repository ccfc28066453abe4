"""The node: the machine, the memory and the sessions, and what performs the machine's effects.

One object, one thread: everything here runs on the event loop, never awaits inside a step, and
goes through `apply`. Slow work is handed to worker threads, which come back with an event.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from kvd.config.load import LoadedConfig
from kvd.config.model import Config
from kvd.core import effects as ef
from kvd.core import events as ev
from kvd.core.errors import InvariantError
from kvd.core.holds import Timing
from kvd.core.ids import MemberRef, kvd_executor
from kvd.core.machine import Machine
from kvd.core.state import Limits, Settings, State
from kvd.server.last_life import record_of
from kvd.server.logs import Logs
from kvd.server.loop_meter import LoopMeter
from kvd.server.memory_keeper import MemoryKeeper
from kvd.server.replies import ReplyBook
from kvd.server.sessions import MemberSession, SessionTable
from kvd.server.transition_log import TransitionLog
from kvd.store.native_index import NativeIndex
from kvd.store.native_queues import NativeQueues
from kvd.wire.protocol import BOOT_ID_BYTES

TICK_SECONDS: Final = 0.05
"""How often deadlines are looked at; well below every configurable interval."""


def settings_of(config: Config) -> Settings:
    """What the machine takes from the configuration."""
    release, limits = config.release, config.limits
    region_bytes = config.regions.size_max or 1 << 62
    return Settings(
        pool_bytes=config.pool.size,
        block_max=config.pool.block_count_max,
        region_bytes=region_bytes,
        lookup_lease=config.leases.lookup_lease,
        orphan_grace=release.save_deadline,
        keep_ended=limits.transfers,
        eviction=config.pool.eviction,
        high_water=config.pool.high_water,
        low_water=config.pool.low_water,
        checksums=config.pool.checksums,
        timing=Timing(
            release.compute_deadline,
            release.save_deadline,
            release.offer_deadline,
            release.read_deadline,
            release.query_interval,
            release.query_attempts,
            release.read_attempts,
        ),
        limits=Limits(
            limits.engines,
            limits.members_per_engine,
            limits.slots_per_member,
            limits.readers_per_slot,
            limits.requests_per_engine,
            limits.blocks_per_request,
            limits.batch_items,
            limits.waiters,
            limits.transfers,
            limits.regions,
            limits.story_entries,
        ),
    )


class Node:
    """What the sockets share."""

    def __init__(self, loaded: LoadedConfig, logs: Logs) -> None:
        """An idle node; sockets register themselves with `sinks`."""
        self.loaded = loaded
        self.config = loaded.config
        self.boot_id = secrets.token_bytes(BOOT_ID_BYTES)
        self.machine = Machine(settings_of(self.config), NativeIndex(), NativeQueues)
        self.memory = MemoryKeeper(self.config)
        self.sessions = SessionTable()
        self.replies = ReplyBook()
        self.counters: Counter[str] = Counter()
        self.meter = LoopMeter()
        self.logs = logs
        self._steps = TransitionLog(logs)
        self.is_ready = False
        self.is_stopping = False
        self.on_forgotten: list[Callable[[MemberSession], None]] = []
        """Called before a member's session is dropped, while its descriptors are still open."""
        self.on_joined: list[Callable[[MemberRef], None]] = []
        """Called with each member that said hello, once it is recorded."""
        self._woken: dict[bytes, MemberSession] = {}
        self._gates_stored = 0
        self._recorded = 0
        self._kept: set[MemberRef] = set()
        self._performers: Final[dict[type, Callable[[Any], None]]] = {
            ef.StoreGate: self._store_gate,
            ef.Reply: self._reply,
            ef.Refuse: self._refuse,
            ef.WriteHeader: self.memory.write_header,
            ef.WriteSums: self.memory.sums.write,
            ef.MarkFilling: lambda effect: self.memory.mark_filling(effect.blocks),
            ef.MarkVoid: lambda effect: self.memory.mark_filling(effect.blocks),
            ef.ClearHeaders: lambda effect: self.memory.clear_headers(effect.blocks),
            ef.FormatPool: self.memory.format_pool,
            ef.DropMember: self._drop_member,
            ef.FenceMember: self._fence_member,
            ef.MakeRegion: self._make_region,
            ef.FreeRegion: lambda effect: self.memory.free_decode_region(effect.region),
        }

    @property
    def state(self) -> State:
        """The machine's books, to be read within one step."""
        return self.machine.state

    @property
    def executor(self) -> str:
        """The name under which peers know this kvd as a reader."""
        return kvd_executor(self.boot_id.hex())

    @property
    def allowed_uids(self) -> frozenset[int]:
        """Users whose processes may attach and talk to this kvd."""
        return frozenset({0, os.getuid(), *self.config.server.allowed_uids})

    def reconfigure(self, loaded: LoadedConfig) -> None:
        """Go on with a configuration that differs in reloadable keys only."""
        self.loaded, self.config = loaded, loaded.config
        self.machine.reconfigure(settings_of(loaded.config))
        self.logs.set_level(loaded.config.server.log_level)

    def now(self) -> int:
        """The machine's clock, ns."""
        return time.monotonic_ns()

    def on(self, effect: type, sender: Callable[[Any], None]) -> None:
        """Let a socket perform a kind of effect."""
        self._performers[effect] = sender

    # The one step -----------------------------------------------------------------------------

    def apply(self, *events: ev.Event) -> None:
        """Let events happen and perform what follows, in order, within this step."""
        try:
            effects = self.machine.handle(events, self.now())
        except InvariantError as error:
            self._steps.invariant(error)
            raise
        if self.machine.state.roster != self._recorded:
            self._record()
        performers = self._performers
        for effect in effects:
            performers[type(effect)](effect)
        if self._woken:
            self.meter.gates_stored(self._gates_stored)
            self._gates_stored = 0
            for session in self._woken.values():
                session.wake()
            self._woken.clear()
        if self._steps.enabled:
            for event in events:
                self._steps.step(event, effects)

    def apply_soon(self, *events: ev.Event) -> None:
        """Apply events in a later step: what performs an effect must not start another step."""
        asyncio.get_running_loop().call_soon(self.apply, *events)

    def tick(self) -> None:
        """Look at deadlines."""
        before = time.thread_time_ns()
        self.apply(ev.Tick())
        self.meter.add("tick", time.thread_time_ns() - before)

    def _record(self) -> None:
        """Members came or went: before anybody is told, the next life of kvd could know it, too."""
        state = self.machine.state
        for ref in state.members.keys() - self._kept:
            session = self.sessions.members.get(ref)
            if session is not None:
                self.memory.keep_member(ref, session.pidfd)
            for told in self.on_joined:
                told(ref)
        for ref in self._kept - state.members.keys() - state.absent:
            self.memory.drop_member(ref)
        self._kept = {*state.members, *state.absent}
        self.memory.write_record(record_of(state))
        self._recorded = state.roster

    # Effects ----------------------------------------------------------------------------------

    def _store_gate(self, effect: ef.StoreGate) -> None:
        session = self.sessions.members.get(effect.member)
        if session is not None and session.page is not None:
            session.page.set(effect.slot, effect.epoch, effect.state)
            self._gates_stored += 1
            self._woken[session.token] = session

    def _reply(self, effect: ef.Reply) -> None:
        self.replies.answer(effect.reply, effect.result)

    def _refuse(self, effect: ef.Refuse) -> None:
        self.replies.refuse(effect.reply, effect.error)

    def _drop_member(self, effect: ef.DropMember) -> None:
        session = self.sessions.members.get(effect.ref)
        if session is not None:
            self.forget_member(session)

    def forget_member(self, session: MemberSession) -> None:
        """Drop a session and its memory; copies out of its slots are waited for elsewhere."""
        for told in self.on_forgotten:
            told(session)
        self.sessions.drop(session)
        session.close_fds()
        self.memory.run(session.close_memory)

    def close_sessions(self) -> None:
        """kvd ends: unmap what members passed; what they map themselves stays theirs."""
        for session in list(self.sessions.members.values()):
            self.sessions.drop(session)
            session.close_fds()
            self.memory.run(session.close_memory)

    def _fence_member(self, effect: ef.FenceMember) -> None:
        """A member is fenced by its death only; while it lives, its word is awaited."""
        session = self.sessions.members.get(effect.member)
        if session is None or session.is_dead():
            event: ev.Event = ev.MemberDied(effect.member)
        else:
            event = ev.FenceEnded(effect.ref, effect.kind, effect.owner, stopped=False)
        self.apply_soon(event)

    def _make_region(self, effect: ef.MakeRegion) -> None:
        self.memory.make_decode_region(effect.region, effect.spec, self.apply)
