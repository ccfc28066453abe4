"""A bare member of an engine: one thread, one socket, frames as they are.

For benches and tests of the protocol itself, where the shim's client would be in the way.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import zmq

from kvd.server import seqpacket
from kvd.wire import attach, messages
from kvd.wire.codec import (
    attach_reply_codec,
    attach_request_codec,
    client_codec,
    server_codec,
)
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, Part
from kvd.wire.protocol import ATTACH_SOCKET, ENGINE_SOCKET, PROTOCOL, PROTOCOL_MIN
from kvd.wire.slot_items import SlotItem
from kvd_kernels.host import Mapping

REPLY_MS = 10_000


class WireError(RuntimeError):
    """kvd refused; `code` and `context` are what it said."""

    def __init__(self, code: str, context: dict[str, str]) -> None:
        super().__init__(code, context)
        self.code = code
        self.context = context


def simple_layout(
    num_layers: int = 1, row_bytes: int = 64, block_tokens: int = 128
) -> BlockLayoutSpec:
    """A layout of equal layers with one part."""
    layers = [[Part("main", row_bytes)] for _ in range(num_layers)]
    return BlockLayoutSpec("bench", "uint8", block_tokens, layers)


class WireClient:
    """An attached member."""

    def __init__(
        self,
        runtime_dir: Path,
        engine: str = "bench",
        member: str = "rank0",
        *,
        num_slots: int = 0,
        device_fd: int = -1,
        incarnation: int = 0,
    ) -> None:
        """Attach.

        Raises: WireError when kvd refuses.
        """
        self.incarnation = incarnation or int.from_bytes(os.urandom(7), "little")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.socket.settimeout(REPLY_MS / 1000)
        self.socket.connect(str(runtime_dir / ATTACH_SOCKET))
        size = os.fstat(device_fd).st_size if device_fd >= 0 else 0
        request = attach.AttachMember(
            PROTOCOL_MIN, PROTOCOL, engine, member, self.incarnation, num_slots, size
        )
        pidfd = os.pidfd_open(os.getpid())
        try:
            fds = [pidfd, device_fd] if device_fd >= 0 else [pidfd]
            seqpacket.send(self.socket, attach_request_codec().encode(request), fds)
        finally:
            os.close(pidfd)
        data, received, _ = seqpacket.receive(self.socket)
        reply = attach_reply_codec().decode(data)
        if isinstance(reply, attach.Refused):
            self.socket.close()
            raise WireError(reply.code, reply.context)
        assert isinstance(reply, attach.Attached)
        self.attached = reply
        self.event_fd = -1
        self.page: Mapping | None = None
        self.pool: Mapping | None = None
        if reply.gate_bytes:
            page_fd, self.event_fd = received.pop(0), received.pop(0)
            self.page = Mapping(page_fd, reply.gate_bytes, writable=False)
            os.close(page_fd)
        if reply.pool_bytes:
            pool_fd = received.pop(0)
            self.pool = Mapping(pool_fd, reply.pool_bytes, writable=True)
            os.close(pool_fd)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.zmq = self._context.socket(zmq.DEALER)
        self.zmq.setsockopt(zmq.LINGER, 0)
        self.zmq.setsockopt(zmq.RCVTIMEO, REPLY_MS)
        self.zmq.connect(f"ipc://{runtime_dir / ENGINE_SOCKET}")
        self.encode = client_codec().encode
        self.decode = server_codec().decode
        self._number = 0
        self.next_no = 0

    def head(self) -> tuple[int, bytes, int]:
        """Number, token and deadline of the next request."""
        self._number += 1
        return self._number, self.attached.token, REPLY_MS

    def call(self, frame: messages.ClientFrame) -> messages.ServerFrame:
        """Send a request and wait for its reply.

        Raises: WireError for an `error` reply, zmq.Again when none comes.
        """
        self.zmq.send(self.encode(frame))
        while True:
            reply = self.decode(self.zmq.recv())
            if isinstance(reply, messages.Error):
                raise WireError(reply.code, reply.context)
            if reply.request_no == frame.request_no:
                return reply

    def hello(
        self,
        layout: BlockLayoutSpec | None,
        *,
        is_scheduler: bool = True,
        contributes: bool = True,
        rank: int = 0,
        tp_size: int = 1,
        device: DeviceLayout | None = None,
        slots: Sequence[messages.SlotAnnounce] = (),
        probe: bytes = b"",
        protocol: tuple[int, int] = (PROTOCOL_MIN, PROTOCOL),
        kv_port: int = 0,
        store: str = "",
        about: dict[str, str] | None = None,
    ) -> messages.HelloOk:
        """Register."""
        frame = messages.Hello(
            *self.head(),
            *protocol,
            is_scheduler,
            rank,
            tp_size,
            0,
            0,
            contributes,
            probe,
            layout,
            device,
            [],
            list(slots),
            kv_port,
            store,
            about or {},
        )
        reply = self.call(frame)
        assert isinstance(reply, messages.HelloOk)
        self.next_no = reply.next_no
        return reply

    def events(self, items: Sequence[SlotItem]) -> list[str]:
        """Send slot events and wait; returns their codes, [] when all are ok."""
        reply = self.call(self.events_frame(items))
        assert isinstance(reply, messages.Seen)
        self.next_no = reply.next_no
        return list(reply.codes)

    def events_frame(
        self, items: Sequence[SlotItem], first_no: int | None = None
    ) -> messages.Events:
        """The frame that `events` sends."""
        first = self.next_no if first_no is None else first_no
        return messages.Events(
            *self.head(), self.attached.boot_id, self.incarnation, first, list(items)
        )

    def reserve(self, request: str, count: int) -> list[int]:
        """Reserve blocks."""
        reply = self.call(messages.Reserve(*self.head(), request, count))
        assert isinstance(reply, messages.Taken)
        return list(reply.blocks)

    def lookup(self, request: str, hashes: bytes, *, pin: bool = True) -> list[int]:
        """Look a prefix up."""
        reply = self.call(messages.Lookup(*self.head(), request, hashes, pin))
        assert isinstance(reply, messages.Found)
        return list(reply.blocks)

    def commit(self, blocks: Sequence[int], hashes: bytes, tokens: Sequence[int]) -> list[str]:
        """Commit blocks."""
        frame = messages.Commit(*self.head(), list(blocks), hashes, list(tokens))
        reply = self.call(frame)
        assert isinstance(reply, messages.Statuses)
        return list(reply.codes)

    def unpin(self, request: str) -> None:
        """End a request."""
        self.call(messages.Unpin(*self.head(), request))

    def close(self) -> None:
        """Drop everything, as a process that ends would."""
        self.zmq.close(linger=0)
        self._context.term()
        self.socket.close()
        if self.page is not None:
            self.page.close()
        if self.pool is not None:
            self.pool.close()
        if self.event_fd >= 0:
            os.close(self.event_fd)
