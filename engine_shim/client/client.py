"""The client of an engine member: a plain, blocking face for one background thread.

Any number of threads may call at once; each sleeps on its own request. Every call has a deadline:
`deadline_s`, seconds from now, None for the default of the options. Refusals are `KvdRefused`.

    with KvdClient(identity) as kvd:
        blocks = kvd.reserve("request-1", 2)
        tenancy = kvd.slots.acquire(0)

The end of a `with` says goodbye: kvd forgets the member and what its requests kept.
"""

from __future__ import annotations

from contextlib import suppress
from types import MappingProxyType, TracebackType
from typing import Final, Self

from engine_shim.client.desk import SlotDesk
from engine_shim.client.errors import KvdRefused
from engine_shim.client.identity import MemberIdentity, Sockets
from engine_shim.client.link import Link
from engine_shim.client.operations import Operations
from engine_shim.client.options import ClientOptions, end_after, left_s
from engine_shim.client.session import Core, LinkState
from engine_shim.client.statistics import ClientStatistics
from kvd.wire.messages import Done, Goodbye
from kvd_kernels.host import Mapping

PARTING_S: Final = 1.0
"""How long the end of a `with` waits for kvd to hear the goodbye."""


class KvdClient(Operations):
    """One member's connection to its kvd."""

    def __init__(
        self,
        identity: MemberIdentity,
        runtime_dir: str = "",
        options: ClientOptions | None = None,
    ) -> None:
        """Nothing is connected before `open`.

        Args: runtime_dir: of the daemon, empty for what the environment says.
        Raises: KvdRefused(runtime_dir_unusable).
        """
        sockets = Sockets.find(runtime_dir)
        super().__init__(Core(options or ClientOptions(), identity.num_slots, sockets.attach))
        self._link = Link(self._core, identity, sockets)
        self._is_open = False
        self.identity: Final = identity
        self.slots: Final = SlotDesk(self._core, str(identity), identity.contributes)

    # Life -------------------------------------------------------------------------------------

    def open(self, deadline_s: float | None = None) -> Self:
        """Attach and say hello; tried again until the deadline when that may help.

        Args: deadline_s: None for `connect_deadline_s`.
        Raises:
            KvdRefused: the last refusal; the client is closed then.
            RuntimeError: it was called before.
        """
        core = self._core
        core.check_process()
        end = end_after(core.options.connect_deadline_s if deadline_s is None else deadline_s)
        with core.lock:
            if core.is_closing:
                raise KvdRefused("closed")
            if self._is_open:
                raise RuntimeError("open was called before")
            self._is_open = True
        self._link.start(end)
        with core.lock:
            while core.state is LinkState.CONNECTING:
                core.changed.wait()
            failure = core.failure if core.state is LinkState.FAILED else None
            if core.state is LinkState.CLOSED:
                raise core.unreachable()
        if failure is not None:
            self.close()
            raise failure
        return self

    def __enter__(self) -> Self:
        """Open, unless that was done."""
        return self if self._is_open else self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say goodbye and close; after an exception, or when that cannot be said, just close.

        After an exception nobody knows what still touches slots and blocks.
        """
        if kind is None:
            self._part()
        self.close()

    def _part(self) -> None:
        """Say goodbye if kvd hears it soon."""
        core = self._core
        if not core.is_own_process or core.is_closing or core.state is not LinkState.ATTACHED:
            return
        # In use, lost or too late: kvd learns of the end from the end of the process.
        with suppress(KvdRefused):
            self.goodbye(PARTING_S)

    def close(self) -> None:
        """End the connection and unmap everything; who waits gets `closed`. Idempotent.

        kvd keeps what this process holds until the process has ended, or said `goodbye` before.
        In a forked child it does nothing. Raises: BufferError: a view of pool or region is alive.
        """
        core = self._core
        if self._link.is_own_thread or not core.is_own_process:
            return
        with core.lock:
            core.is_closing = True
            core.changed.notify_all()
            core.room.notify_all()
        core.wakeup.set()
        if self._is_open:
            self._link.join()
        else:
            core.end()
        with core.lock:
            session, core.session = core.session, None
        if session is not None and session.gate is not None:
            core.retire_gate(session.gate)
        core.retired.finish()
        for mapping in (core.pool, *core.regions.values()):
            if mapping is not None:
                mapping.close()
        core.wakeup.close()

    def goodbye(self, deadline_s: float | None = None) -> None:
        """Tell kvd that this member touches nothing any more, and close.

        Raises: KvdRefused(tenancy_misused): a slot is still in use; nothing was said.
        """
        core, end = self._core, self._caller.end(deadline_s)
        self.flush(left_s(end))
        with core.lock:
            if core.books.num_busy:
                detail = f"{core.books.num_busy} slots are still in use"
                raise KvdRefused("tenancy_misused", slot="any", epoch="any", detail=detail)
            core.is_parting = True
        try:
            self._ask(Goodbye, (), Done, "goodbye", end)
        except KvdRefused as refusal:
            # kvd may hang up before its reply is read: that is an answer, too.
            if refusal.code not in ("unreachable", "closed"):
                core.is_parting = False
                raise
        self.close()

    def flush(self, deadline_s: float | None = None) -> None:
        """Wait until kvd has acknowledged every slot event.

        Raises: KvdRefused(deadline_exceeded).
        """
        core, end = self._core, self._caller.end(deadline_s)
        core.check_process()
        with core.lock:
            core.push()
            while len(core.stream):
                if core.state in (LinkState.FAILED, LinkState.CLOSED) or core.is_closing:
                    raise core.unreachable()
                left = left_s(end)
                if left == 0:
                    raise KvdRefused("deadline_exceeded", what="acknowledging slot events")
                core.room.wait(left)

    def wait_attached(self, deadline_s: float | None = None) -> int:
        """Wait until kvd is there (again); returns the generation.

        Raises: KvdRefused(unreachable) at the deadline, or once attaching was given up.
        """
        core, end = self._core, self._caller.end(deadline_s)
        core.check_process()
        with core.lock:
            while core.state is not LinkState.ATTACHED:
                left = left_s(end)
                gone = core.state in (LinkState.FAILED, LinkState.CLOSED) or core.is_closing
                if gone or left == 0:
                    raise core.unreachable()
                core.changed.wait(left)
            return core.generation

    def retry(self) -> None:
        """Begin to attach again after that was given up (state failed); harmless otherwise."""
        core = self._core
        core.check_process()
        with core.lock:
            core.wants_retry = core.state is LinkState.FAILED
        core.wakeup.set()

    # What is known without asking -------------------------------------------------------------

    @property
    def state(self) -> LinkState:
        """How the client stands with kvd now."""
        return self._core.state

    @property
    def is_attached(self) -> bool:
        """Whether kvd is there now, as far as this process knows."""
        return self._core.state is LinkState.ATTACHED

    @property
    def generation(self) -> int:
        """Grows with each new life of kvd: blocks and regions of an older one are void."""
        return self._core.generation

    @property
    def boot_id(self) -> bytes:
        """The life of kvd that the present blocks are of; b"" before the first attach.

        Send it along with block numbers to other processes: `SlotDesk.acquire` compares it.
        """
        return self._core.boot_id

    @property
    def pool(self) -> Mapping | None:
        """The pool's memory, None when kvd has none; another object after a restart of kvd."""
        return self._core.pool

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, 0 while no engine has given it a layout."""
        session = self._core.session
        return session.num_blocks if session is not None else 0

    @property
    def block_stride(self) -> int:
        """Bytes from one block of the pool to the next."""
        session = self._core.session
        return session.block_stride if session is not None else 0

    @property
    def checksums(self) -> str:
        """Which spans of the pool have checksums: off, sampled or always, as kvd says."""
        session = self._core.session
        return session.checksums if session is not None else "off"

    def statistics(self) -> ClientStatistics:
        """What was done so far."""
        core = self._core
        core.check_process()
        with core.lock:
            counts, requests = core.stream.counts, core.requests
            gate = core.session.gate if core.session is not None else None
            now = gate.statistics() if gate is not None else None
            return ClientStatistics(
                state=core.state.value,
                generation=core.generation,
                attaches=core.attaches,
                last_reattach_s=core.reattach_ns / 1e9,
                requests=MappingProxyType(dict(requests.outcomes)),
                requests_open=len(requests),
                replies_unknown=requests.replies_unknown + counts.strays,
                replies_malformed=core.replies_malformed,
                queries=core.queries,
                events_sent=counts.sent,
                events_acked=counts.acked,
                events_resent=counts.resent,
                events_refused=counts.refused,
                events_replaced=counts.replaced,
                events_unacked=len(core.stream),
                slots_busy=core.books.num_busy,
                mappings_retired=len(core.retired),
                gate_waits=MappingProxyType(dict(core.gate_waits)),
                gate_wakes=core.gate_wakes + (now.wakes if now is not None else 0),
                gate_spins=core.gate_spins + (now.spins if now is not None else 0),
            )
