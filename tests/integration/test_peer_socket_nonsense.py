"""Peers with a link that say well-formed nonsense: refused or ignored, and kvd goes on.

A peer has proven who it is, not that it is sane.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvd.server.host_identity import kernel_boot_id
from kvd.wire import attach
from kvd.wire import peer_messages as pm
from kvd.wire.codec import attach_reply_codec, attach_request_codec
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, Part, SlotArea
from kvd.wire.protocol import ATTACH_SOCKET
from tests.integration.live_kvd import LiveKvd, until
from tests.integration.raw_attach import RawAttach, own_pidfd
from tests.integration.raw_frames import LAYOUT, ROW, TOKENS
from tests.integration.raw_peers import (
    BLOCK_BYTES,
    QUICK,
    DecodeMember,
    PrefillMember,
    RawConsumer,
    RawProducer,
    free_port,
    hand_off,
)

BOOT = b"N" * 16
NUMBERS = (0, 1, 2, 3, 4, 5, 4096, 1 << 31, 1 << 32, 1 << 56, (1 << 63) - 1, (1 << 64) - 1)
ROUNDS = 1500


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture(scope="module")
def producer() -> Iterator[LiveKvd]:
    with LiveKvd(*QUICK) as made:
        yield made


@pytest.fixture(scope="module")
def consumer() -> Iterator[LiveKvd]:
    with LiveKvd(*QUICK) as made:
        yield made


class Nonsense:
    """Draws names and numbers, often those that exist."""

    def __init__(self, seed: int, transfers: list[str], incarnation: int) -> None:
        self.draw = random.Random(seed)
        self._transfers = transfers
        self._incarnation = incarnation

    def number(self) -> int:
        """Mostly small."""
        draw = self.draw
        return draw.choice(NUMBERS) if draw.random() < 0.2 else draw.randrange(3)

    def read(self) -> pm.ReadName:
        """The name of a read."""
        layer = self.draw.choice([0, 0, 0, 1, -1, -(1 << 63), (1 << 63) - 1])
        start = self.draw.choice([0, 0, 0, 4, self.number()])
        return pm.ReadName(self.draw.choice(self._transfers), layer, start, self.number() % 3)

    def tenancy(self) -> pm.TenancyName:
        """The name of a tenancy."""
        engine = self.draw.choice(["p", "p", "p", "nobody"])
        incarnation = self.draw.choice([self._incarnation, self._incarnation, 7])
        return pm.TenancyName(engine, "w", incarnation, self.number(), self.number())

    def source(self) -> pm.SourceItem:
        """Where rows are."""
        kind = self.draw.choice(["slot", "slot", "pool", "elsewhere"])
        blocks = [self.number() for _ in range(self.draw.randrange(4))]
        return pm.SourceItem(self.tenancy(), kind, blocks, self.number())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_reader_that_says_nonsense(producer: LiveKvd, stack: ExitStack, seed: int) -> None:
    prefill = stack.enter_context(PrefillMember(producer))
    port = RawConsumer()
    stack.callback(port.close)
    for slot in range(3):
        prefill.offer(f"t-nonsense-{seed}-{slot}", port.port, b"x" * BLOCK_BYTES, slot)
    token = attach_reader(producer, port, stack)
    names = [f"t-nonsense-{seed}-{slot}" for slot in range(3)] + ["t-unknown"]
    made = Nonsense(seed, names, prefill.incarnation)
    for _ in range(ROUNDS):
        tenancy, read = made.tenancy(), made.read()
        frames: list[pm.ToProducer] = [
                pm.Claim(token, BOOT, tenancy, read, made.number()),
                pm.Decline(token, BOOT, tenancy, read),
                pm.ReadOver(token, BOOT, tenancy, read, made.draw.random() < 0.5),
                pm.PeerAnswer(
                    token, BOOT, tenancy, read,
                    made.draw.choice(["running", "unknown", "ended_ok", "never_started", "what"]),
                    made.draw.random() < 0.5,
                ),
                pm.PeerWelcome(token, BOOT, made.number(), b"y"),
                pm.PeerRefused(token, BOOT, "busy", {"limit": "x"}),
                pm.Ping(token, BOOT),
            ]  # fmt: skip
        port.send(made.draw.choice(frames))
    port.send(b"\xc1")
    until(lambda: producer.refused("peer_frames.frame_malformed") > seed, "all was looked at")
    assert producer.alive(), producer.log()
    assert producer.status()["invariants"]["ok"], producer.status()["invariants"]


def attach_reader(producer: LiveKvd, port: RawConsumer, stack: ExitStack) -> bytes:
    """Answer a hello as a kvd would; returns the token that our frames carry."""
    said = port.hello()
    connection = stack.enter_context(RawAttach(producer.runtime_dir))
    pidfd = stack.enter_context(own_pidfd())
    request = attach.AttachReader(1, 1, BOOT, said.nonce, b"s" * 16)
    reply = connection.ask(attach_request_codec().encode(request), [pidfd])
    assert isinstance(reply, attach.Attached)
    port.send(pm.PeerWelcome(reply.token, BOOT, 1, b""))
    return reply.token


class MadProducer:
    """A kvd's attach.sock in a thread: it hands out memory with a layout that may be anything."""

    def __init__(self, stack: ExitStack, seed: int, boot_id: bytes) -> None:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-"))
        self.path = str(Path(directory) / ATTACH_SOCKET)
        self._draw = random.Random(seed)
        self._boot_id = boot_id
        self.token = b""
        self._listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._listener.bind(self.path)
        self._listener.listen()
        self._memory = os.memfd_create("mad", os.MFD_ALLOW_SEALING)
        os.ftruncate(self._memory, 1 << 16)
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        stack.callback(os.close, self._memory)
        self._connection: socket.socket | None = None
        thread = threading.Thread(target=self._serve)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self._hang_up)

    def _hang_up(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._connection is not None:
            with suppress(OSError):  # its thread may have closed it
                self._connection.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        try:
            self._connection, _ = self._listener.accept()
        except OSError:
            return
        with self._connection as connection:
            while True:
                data, fds, _, _ = socket.recv_fds(connection, 1 << 17, 8)
                for fd in fds:
                    os.close(fd)
                if not data:
                    return
                request = attach_request_codec().decode(data)
                if isinstance(request, attach.AttachReader):
                    self.token = request.your_token
                    reply: attach.AttachReply = attach.Attached(
                        1, self._boot_id, b"r" * 16, 1 << 16, 0
                    )
                else:
                    reply = self._mapped()
                socket.send_fds(connection, [attach_reply_codec().encode(reply)], [self._memory])

    def _mapped(self) -> attach.AttachReply:
        draw = self._draw
        area = SlotArea("main", draw.choice([0, 0, 1 << 60]), draw.choice([ROW, ROW, 1, 1 << 40]))
        parts = draw.choice([[area], [area], [], [area, SlotArea("odd", 0, ROW)]])
        tokens = draw.choice([TOKENS, TOKENS, 1, 1 << 40])
        device = DeviceLayout(
            tokens, 1, [0, 4096, 1 << 62], draw.choice([[0] * 3, [9] * 3]), [parts]
        )
        other = BlockLayoutSpec("m", "f", TOKENS, [[Part("main", 3)]], draw.choice([1, 2]))
        layout = draw.choice([LAYOUT, LAYOUT, other, None])
        replies: list[attach.AttachReply] = [
            attach.Mapped(1 << 16, device, layout),
            attach.Mapped(1 << 16, device, layout),
            attach.Mapped(1 << 62, device, layout),
            attach.Mapped(1 << 16),
            attach.Refused("engine_unknown"),
        ]
        return draw.choice(replies)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_producer_that_says_nonsense(
    producer: LiveKvd, consumer: LiveKvd, stack: ExitStack, seed: int
) -> None:
    """Reads that cannot be copied fail their transfer; those of others arrive."""
    decode = stack.enter_context(DecodeMember(consumer, free_port()))
    boot_id = bytes([seed]) * 16
    mad = MadProducer(stack, seed, boot_id)
    link = RawProducer(decode.port)
    stack.callback(link.close)
    link.send(pm.PeerHello(b"", boot_id, 1, 1, kernel_boot_id(), mad.path, b"n" * 16))
    assert isinstance(link.receive(), pm.PeerWelcome)
    names = [f"t-mad-{seed}-{number}" for number in range(6)]
    for number, name in enumerate(names):
        decode.expect(name, number)
    made = Nonsense(seed, [*names, "t-unknown"], 7)
    claims: list[pm.Claim] = []
    for _ in range(ROUNDS // 3):
        token = mad.token
        frames: list[pm.ToConsumer] = [
                pm.Offers(token, boot_id, [
                    pm.OfferItem(made.read(), made.number(), made.source())
                    for _ in range(made.draw.randrange(3))
                ]),
                pm.Offers(token, boot_id, [pm.OfferItem(
                    pm.ReadName(made.draw.choice(names), 0, 0, made.number() % 2),
                    TOKENS, made.source(),
                )]),
                pm.Revoke(token, boot_id, made.read(), made.draw.choice(["gone", "gone", "no"])),
                pm.PeerQuery(token, boot_id, made.tenancy(), made.read(), made.draw.random() < 0.5),
                pm.MemberGone(token, boot_id, "p", "w", made.draw.choice([7, 8])),
                pm.Ping(token, boot_id),
            ]  # fmt: skip
        link.send(made.draw.choice(frames))
        while link.socket.poll(1):
            frame = link.receive()
            if isinstance(frame, pm.Claim):
                claims.append(frame)
        if claims:
            claim = made.draw.choice(claims)
            link.send(pm.Grant(token, boot_id, claim.read, claim.claim, made.source()))
            link.send(pm.Grant(token, boot_id, made.read(), made.number(), made.source()))
    assert consumer.alive(), consumer.log()
    prefill = stack.enter_context(PrefillMember(producer))
    hand_off(prefill, decode, f"t-sane-{seed}", block=7)
    assert consumer.status()["invariants"]["ok"], consumer.status()["invariants"]
    assert consumer.counter("copies_failed") > 0
