"""One attempt to get a session: attach, open engine.sock, announce the slots, say hello."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, NamedTuple

import zmq

from engine_shim.client.attaching import Attachment, attach, receive
from engine_shim.client.errors import KvdRefused
from engine_shim.client.identity import MemberIdentity, Sockets
from engine_shim.client.options import left_ms
from engine_shim.client.session import SUMS_REGION, Core, LinkState, Session
from kvd.wire.codec import FrameError, client_codec, server_codec
from kvd.wire.messages import Error, Hello, HelloOk, SlotAnnounce
from kvd.wire.protocol import PROTOCOL, PROTOCOL_MIN, agree

Dealer = zmq.Socket[bytes]

QUEUE_FRAMES: Final = 1024
"""Frames that ZeroMQ keeps in either direction before it refuses more."""


class Announcement(NamedTuple):
    """What a kvd was told of the slots: where the event stream was when it was told first."""

    boot_id: bytes
    mark: int


NOBODY: Final = Announcement(b"", 0)


@dataclass(slots=True)
class Greeted:
    """A session that is ready to be used; owned by whoever holds it."""

    attachment: Attachment
    dealer: Dealer
    hello_ok: HelloOk
    mark: int


class Greeter:
    """Makes attempts; remembers what a kvd was told, should only its answer get lost."""

    def __init__(
        self,
        core: Core,
        identity: MemberIdentity,
        sockets: Sockets,
        context: zmq.Context[Dealer],
    ) -> None:
        self._core = core
        self._identity = identity
        self._sockets = sockets
        self._context = context
        self._told = NOBODY

    def attempt(self, end: int) -> Greeted:
        """Attach and say hello once.

        Args: end: deadline, ns of the monotonic clock.
        Raises: KvdRefused; nothing stays open.
        """
        try:
            return self._attempt(end)
        except (OSError, zmq.ZMQError) as error:
            # Of this process: no descriptor, no memory. It may pass, like an absent daemon.
            raise self._core.gone(error.strerror or str(error)) from error

    def _attempt(self, end: int) -> Greeted:
        core = self._core
        with ExitStack() as undo:
            attachment = attach(
                self._sockets,
                self._identity,
                core.options.trusted_uids,
                core.wakeup,
                lambda: core.is_closing,
                end,
            )
            undo.callback(attachment.close)
            dealer = self._open_dealer()
            undo.callback(dealer.close, 0)
            number, data = self._hello(attachment, end)
            dealer.send(data)
            reply = self._await_hello(dealer, attachment, number, end)
            undo.pop_all()
        mark, self._told = self._told.mark, NOBODY
        return Greeted(attachment, dealer, reply, mark)

    def _open_dealer(self) -> Dealer:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
        dealer.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
        dealer.connect(f"ipc://{self._sockets.engine}")
        return dealer

    def _hello(self, attachment: Attachment, end: int) -> tuple[int, bytes]:
        core, me = self._core, self._identity
        with core.lock:
            slots = self._announce(attachment.boot_id)
            number = core.requests.number()
        frame = Hello(
            number,
            attachment.token,
            left_ms(end),
            PROTOCOL_MIN,
            PROTOCOL,
            me.is_scheduler,
            me.rank,
            me.tp_size,
            me.dp_rank,
            me.shard,
            me.contributes,
            me.hash_probe,
            me.layout,
            me.device,
            list(me.resident),
            slots,
            me.kv_port,
            me.store,
            dict(me.about),
        )
        try:
            return number, client_codec().encode(frame)
        except FrameError as error:
            raise KvdRefused(error.code, **error.context) from error

    def _announce(self, boot_id: bytes) -> list[SlotAnnounce]:
        """The slots as they are now. The lock is held, so the events agree with the books.

        A kvd that was told before, but whose answer got lost, goes by what it was told first: what
        was posted since then reaches it as events. Those that say what it knows are ignored there.
        """
        core = self._core
        if self._told.boot_id != boot_id:
            self._told = Announcement(boot_id, core.stream.mark())
        old = core.session
        if old is None or old.gate is None:
            return []
        return core.books.announce(old.gate.word)

    def _await_hello(
        self, dealer: Dealer, attachment: Attachment, number: int, end: int
    ) -> HelloOk:
        core = self._core
        decode = server_codec().decode
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(attachment.sock.fileno(), zmq.POLLIN)
        poller.register(core.wakeup.fd, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(left_ms(end)))
            if core.wakeup.fd in ready:
                core.wakeup.clear()
            if core.is_closing:
                raise KvdRefused("closed")
            if dealer in ready:
                try:
                    reply = decode(dealer.recv())
                except FrameError as error:
                    raise KvdRefused(error.code, **error.context) from error
                if reply.request_no == number:
                    return self._check(reply, attachment)
            elif attachment.sock.fileno() in ready:
                receive(attachment.sock)
                detail = "it ended the connection before it answered the hello"
                raise KvdRefused("unreachable", path=core.path, detail=detail)
            if time.monotonic_ns() >= end:
                raise KvdRefused("deadline_exceeded", what="the hello")

    def _check(self, reply: object, attachment: Attachment) -> HelloOk:
        if isinstance(reply, Error):
            raise KvdRefused(reply.code, **reply.context)
        if not isinstance(reply, HelloOk):
            raise KvdRefused("frame_malformed", detail="the hello got another operation's reply")
        if reply.boot_id != attachment.boot_id:
            raise KvdRefused("stale_boot")
        if agree(reply.protocol, reply.protocol) is None:
            ours = f"{PROTOCOL_MIN}-{PROTOCOL}"
            raise KvdRefused("protocol_mismatch", theirs=reply.protocol, ours=ours)
        if len(reply.epochs) != self._identity.num_slots:
            detail = f"{len(reply.epochs)} epochs for {self._identity.num_slots} slots"
            raise KvdRefused("frame_malformed", detail=detail)
        if reply.batch_items_max < 1 or reply.frame_bytes_max < 4096:
            raise KvdRefused("frame_malformed", detail="limits that fit no frame")
        return reply


def install(core: Core, greeted: Greeted) -> None:
    """Use a new session: from here on its gate page counts, and events go to it.

    What the old session had, and the new one does not go on using, is closed.
    """
    attachment, reply = greeted.attachment, greeted.hello_ok
    session = Session(
        reply.boot_id,
        attachment.token,
        attachment.gate,
        client_codec(reply.frame_bytes_max),
        reply.num_blocks,
        reply.block_stride,
        reply.batch_items_max,
        reply.checksums,
    )
    retired = []
    with core.lock:
        old = core.session
        goes_on = reply.boot_id == core.boot_id and core.stream.can_resume(reply.next_no)
        if goes_on:
            core.stream.resume(reply.next_no, reply.batch_items_max)
        else:
            core.stream.replace(reply.next_no, greeted.mark, reply.batch_items_max)
            core.generation += 1
        if core.pool is not None and attachment.has_pool(core.pool, core.pool_file):
            spare = attachment.pool  # the same memory is mapped already, whichever kvd has it
        else:
            spare, core.pool = core.pool, attachment.pool
            core.pool_file = attachment.pool_file
            retired = list(core.regions.values())
            core.regions.clear()
        if reply.boot_id != core.boot_id:
            # Another life records checksums elsewhere, whatever memory it took over.
            old_sums = core.regions.pop(SUMS_REGION, None)
            retired += [old_sums] if old_sums is not None else []
        attachment.pool = None
        core.session, core.boot_id = session, reply.boot_id
        core.attaches += 1
        if core.lost_at:
            core.reattach_ns = time.monotonic_ns() - core.lost_at
        core.failure = None
        core.set_state(LinkState.ATTACHED)
    core.run_calls()
    if spare is not None:
        retired.append(spare)
    if old is not None and old.gate is not None:
        core.retire_gate(old.gate)
    if retired:
        core.retired.add(retired)
