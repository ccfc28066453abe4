"""Hand-offs between real kvds, driven by bare members; and peers that say anything."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Final

import zmq

from kvd.wire import attach
from kvd.wire import messages as msg
from kvd.wire import peer_messages as pm
from kvd.wire.codec import (
    attach_reply_codec,
    attach_request_codec,
    consumer_codec,
    producer_codec,
)
from kvd.wire.layout import DeviceLayout, SlotArea
from kvd.wire.slot_items import ComputedItem, ReadItem, WrittenItem
from kvd_kernels.host import Mapping
from tests.integration.live_kvd import LiveKvd, until
from tests.integration.raw_frames import LAYOUT, ROW, TOKENS, RawMember, epochs

BLOCKS: Final = 8
SLOT_BYTES: Final = 4096
NUM_SLOTS: Final = 3
BLOCK_BYTES: Final = TOKENS * ROW
REPLY_MS: Final = 10_000

QUICK: Final = (
    "release.offer_deadline=5s",
    "release.query_interval=50ms",
    "release.read_deadline=1s",
    "peers.transfer_deadline=20s",
    "peers.connect_timeout=300ms",
    "regions.size_max=1MiB",
)
"""Deadlines for tests; offers are repeated at a query's interval."""


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PrefillMember(RawMember):
    """A worker with three slots of one block, whose memory kvd has."""

    def __init__(self, kvd: LiveKvd, engine: str = "p") -> None:
        fd = os.memfd_create("slots", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, NUM_SLOTS * SLOT_BYTES)
        self.memory = Mapping(fd, NUM_SLOTS * SLOT_BYTES, writable=True)
        try:
            super().__init__(kvd.runtime_dir, engine, "w", num_slots=NUM_SLOTS, device_fd=fd)
        finally:
            os.close(fd)
        offsets = [slot * SLOT_BYTES for slot in range(NUM_SLOTS)]
        areas = [[SlotArea("main", 0, ROW)]]
        self.hello(LAYOUT, device=DeviceLayout(TOKENS, 1, offsets, [0] * NUM_SLOTS, areas))

    def offer(self, transfer: str, port: int, rows: bytes, slot: int = 0) -> None:
        """Write rows into a slot and offer them to whoever is expected at the port."""
        self.memory.write_bytes(slot * SLOT_BYTES, rows)
        epoch = epochs(self)[slot]
        read = ReadItem(transfer, f"127.0.0.1:{port}", 0, TOKENS, [0])
        assert self.events([WrittenItem(slot, epoch, 0, [], [read])]) == []
        assert self.events([ComputedItem(slot, epoch)]) == []


class DecodeMember(RawMember):
    """A rank of a decode engine with a region of its own, reached at a port."""

    def __init__(self, kvd: LiveKvd, port: int, engine: str = "d") -> None:
        super().__init__(kvd.runtime_dir, engine, "w")
        self.port = port
        self.region = f"region-{engine}"
        self.hello(None, kv_port=port)
        self.call(msg.RegionCreate(*self.head(), self.region, 1, BLOCKS, TOKENS, ROW))
        self.socket.send(attach_request_codec().encode(attach.MapRegion(self.region)))
        data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 1)
        mapped = attach_reply_codec().decode(data)
        assert isinstance(mapped, attach.Mapped)
        self.rows = Mapping(fds[0], mapped.num_bytes, writable=False)
        os.close(fds[0])

    def expect(self, transfer: str, block: int = 0) -> None:
        """Name the destination of a transfer."""
        frame = msg.Expect(*self.head(), transfer, self.region, [block], TOKENS, 1, 15_000)
        assert isinstance(self.call(frame), msg.Done)

    def arrived(self, transfer: str, block: int = 0) -> bytes:
        """Wait for the end of a transfer; returns the rows that came."""
        reply = self.call(msg.AwaitTransfer(*self.head(), transfer))
        assert isinstance(reply, msg.TransferOver)
        return self.rows.read_bytes(block * BLOCK_BYTES, BLOCK_BYTES)


def hand_off(
    prefill: PrefillMember, decode: DecodeMember, transfer: str, block: int = 0, slot: int = 0
) -> None:
    """One transfer from its announcement to the rows at the other end and the slot's release."""
    rows = os.urandom(BLOCK_BYTES)
    epoch = epochs(prefill)[slot]
    decode.expect(transfer, block)
    prefill.offer(transfer, decode.port, rows, slot)
    assert decode.arrived(transfer, block) == rows
    until(lambda: epochs(prefill)[slot] == epoch + 1, "the slot is released")


class RawProducer:
    """Somebody who talks to a decode kvd's port: a DEALER, and no daemon behind it."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, REPLY_MS)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self._encode = consumer_codec().encode
        self._decode = producer_codec().decode

    def send(self, frame: pm.ToConsumer | bytes | Sequence[bytes]) -> None:
        """Send a frame, bytes, or several parts."""
        if isinstance(frame, bytes):
            self.socket.send(frame)
        elif isinstance(frame, pm.PeerFrame):
            self.socket.send(self._encode(frame))
        else:
            self.socket.send_multipart(list(frame))

    def receive(self) -> pm.ToProducer:
        """The next frame."""
        return self._decode(self.socket.recv())

    def refusal(self, frame: pm.PeerHello) -> pm.PeerRefused:
        """Say a hello that is refused."""
        self.send(frame)
        reply = self.receive()
        assert isinstance(reply, pm.PeerRefused), reply
        return reply

    def close(self) -> None:
        """Hang up."""
        self.socket.close(linger=0)
        self._context.term()


class RawConsumer:
    """Somebody who listens where a producer's kvd offers rows: a ROUTER, and no daemon."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, REPLY_MS)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self._encode = producer_codec().encode
        self._decode = consumer_codec().decode
        self.identity = b""

    def receive(self) -> pm.ToConsumer:
        """The next frame of the producer."""
        self.identity, data = self.socket.recv_multipart()
        return self._decode(data)

    def hello(self) -> pm.PeerHello:
        """The next hello."""
        frame = self.receive()
        assert isinstance(frame, pm.PeerHello), frame
        return frame

    def send(self, frame: pm.ToProducer | bytes) -> None:
        """Send a frame, or bytes."""
        data = frame if isinstance(frame, bytes) else self._encode(frame)
        self.socket.send_multipart([self.identity, data])

    def close(self) -> None:
        """Hang up."""
        self.socket.close(linger=0)
        self._context.term()
