"""Whoever listens where a kvd offers rows: believed once it has attached, and only as itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvd.wire import attach
from kvd.wire import peer_messages as pm
from kvd.wire.codec import attach_request_codec
from kvd.wire.protocol import ATTACH_SOCKET
from tests.integration.live_kvd import LiveKvd, until
from tests.integration.raw_attach import RawAttach, own_pidfd
from tests.integration.raw_frames import Talker, epochs, pack
from tests.integration.raw_peers import (
    BLOCK_BYTES,
    QUICK,
    DecodeMember,
    PrefillMember,
    RawConsumer,
    free_port,
    hand_off,
)

BOOT = b"B" * 16
READ = pm.ReadName("t-forged", 0, 0, 0)


@pytest.fixture(scope="module")
def producer() -> Iterator[LiveKvd]:
    with LiveKvd(*QUICK, "limits.peers=3") as made:
        yield made


@pytest.fixture(scope="module")
def consumer() -> Iterator[LiveKvd]:
    with LiveKvd(*QUICK) as made:
        yield made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def prefill(producer: LiveKvd) -> Iterator[PrefillMember]:
    with PrefillMember(producer) as made:
        yield made


@pytest.fixture
def listener() -> Iterator[RawConsumer]:
    """Somebody who listens where rows are offered."""
    made = RawConsumer()
    yield made
    made.close()


def test_an_answer_without_an_attach(
    producer: LiveKvd, prefill: PrefillMember, listener: RawConsumer
) -> None:
    """Garbage, forged welcomes and claims: refused, counted, and the offer stays where it is."""
    prefill.offer("t-forged", listener.port, b"z" * BLOCK_BYTES)
    said = listener.hello()
    assert said.attach_path == str(producer.runtime_dir / ATTACH_SOCKET)
    before = producer.refused("peer_frames.unauthorized")
    garbage = producer.refused("peer_frames.frame_malformed")
    tenancy = pm.TenancyName("p", "w", prefill.incarnation, 0, 0)
    frames: list[pm.ToProducer] = [
        pm.PeerWelcome(said.nonce, BOOT, 1, b"y" * 16),
        pm.Claim(b"", BOOT, tenancy, READ, 1),
        pm.ReadOver(b"", BOOT, tenancy, READ, True),
        pm.Decline(said.nonce, BOOT, tenancy, READ),
        pm.PeerAnswer(b"", BOOT, tenancy, READ, "never_started", True),
    ]
    for frame in frames:
        listener.send(frame)
    for data in (b"", b"\xc1", pack(["offers", b"", BOOT, []]), b"\x91" * 1000):
        listener.send(data)
    until(lambda: producer.refused("peer_frames.unauthorized") == before + len(frames))
    until(lambda: producer.refused("peer_frames.frame_malformed") >= garbage + 3)
    assert producer.status()["transfers"]["reads_open"] == 1
    assert epochs(prefill)[0] == 0
    listener.send(pm.PeerRefused(b"", BOOT, "x" * 100_000, {}))
    until(lambda: any(peer["error"] == "x" * 64 for peer in producer.status()["peers"]))


class Reader:
    """A consumer that has attached to the producer as a reader, and answers at its ports."""

    def __init__(self, producer: LiveKvd, boot_id: bytes = BOOT) -> None:
        self.boot_id = boot_id
        self.token = b""
        self._producer = producer
        self._connections: list[RawAttach] = []

    def welcome(self, port: RawConsumer) -> None:
        """Take a hello, attach with its nonce, and say welcome."""
        said = port.hello()
        connection = RawAttach(self._producer.runtime_dir)
        self._connections.append(connection)
        with own_pidfd() as pidfd:
            request = attach.AttachReader(1, 1, self.boot_id, said.nonce, b"s" * 16)
            reply = connection.ask(attach_request_codec().encode(request), [pidfd])
        assert isinstance(reply, attach.Attached), reply
        self.token = self.token or reply.token
        port.send(pm.PeerWelcome(self.token, self.boot_id, 1, b"s" * 16))

    def claim(self, port: RawConsumer) -> pm.OfferItem:
        """Take an offer and claim it."""
        offers = port.receive()
        while not isinstance(offers, pm.Offers):
            assert isinstance(offers, pm.PeerQuery | pm.Grant), offers
            offers = port.receive()
        assert offers.token == b"s" * 16
        (item,) = offers.items
        port.send(pm.Claim(self.token, self.boot_id, item.source.tenancy, item.read, 5))
        return item

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def test_a_grant_goes_where_somebody_listens(
    producer: LiveKvd, prefill: PrefillMember, stack: ExitStack
) -> None:
    """A kvd has two ports and leaves the first: it is reached by the other."""
    gone, stays = RawConsumer(), RawConsumer()
    stack.callback(stays.close)
    reader = Reader(producer)
    stack.callback(reader.close)
    prefill.offer("t-gone", gone.port, b"a" * BLOCK_BYTES, slot=0)
    reader.welcome(gone)
    prefill.offer("t-stays", stays.port, b"b" * BLOCK_BYTES, slot=1)
    reader.welcome(stays)
    gone.close()
    item = reader.claim(stays)
    grant = stays.receive()
    while isinstance(grant, pm.Offers):
        grant = stays.receive()
    assert isinstance(grant, pm.Grant), grant
    assert (grant.read, grant.claim) == (item.read, 5)
    stays.send(pm.ReadOver(reader.token, BOOT, item.source.tenancy, item.read, True))
    until(lambda: epochs(prefill)[1] == 1)


def test_tokens_are_good_on_their_own_socket_only(
    producer: LiveKvd, prefill: PrefillMember, listener: RawConsumer, stack: ExitStack
) -> None:
    reader = Reader(producer, b"E" * 16)
    stack.callback(reader.close)
    prefill.offer("t-token", listener.port, b"f" * BLOCK_BYTES)
    reader.welcome(listener)
    item = reader.claim(listener)
    talker = stack.enter_context(Talker(producer.runtime_dir))
    error = talker.refusal(pack(["reserve", 3, reader.token, 1000, "r", 1]))
    assert (error.code, error.request_no) == ("unauthorized", 3)
    before = producer.refused("peer_frames.unauthorized")
    tenancy = item.source.tenancy
    listener.send(pm.ReadOver(prefill.attached.token, BOOT, tenancy, item.read, True))
    until(lambda: producer.refused("peer_frames.unauthorized") == before + 1)
    assert epochs(prefill)[0] == 0
    listener.send(pm.ReadOver(reader.token, BOOT, tenancy, item.read, True))
    until(lambda: epochs(prefill)[0] == 1)


def test_a_kvd_does_not_read_under_anothers_name(
    producer: LiveKvd, prefill: PrefillMember, consumer: LiveKvd, listener: RawConsumer,
    stack: ExitStack,
) -> None:  # fmt: skip
    """Whoever has a nonce may attach, but not as a kvd that lives."""
    decode = stack.enter_context(DecodeMember(consumer, free_port()))
    hand_off(prefill, decode, "t-name-0")
    prefill.offer("t-name-1", listener.port, b"c" * BLOCK_BYTES, slot=1)
    said = listener.hello()
    boot_id = bytes.fromhex(consumer.status()["boot_id"])
    with RawAttach(producer.runtime_dir) as connection, own_pidfd() as pidfd:
        request = attach.AttachReader(1, 1, boot_id, said.nonce, b"s" * 16)
        assert connection.refusal(attach_request_codec().encode(request), [pidfd]) == "unauthorized"
        request = attach.AttachReader(1, 1, BOOT, b"wrong nonce", b"s" * 16)
        assert connection.refusal(attach_request_codec().encode(request), [pidfd]) == "unauthorized"
    hand_off(prefill, decode, "t-name-2")


def test_a_reader_that_hangs_up_is_greeted_again(
    producer: LiveKvd, prefill: PrefillMember, listener: RawConsumer
) -> None:
    """Its process lives: it is offered nothing until it has attached again."""
    reader = Reader(producer, b"D" * 16)
    prefill.offer("t-again-0", listener.port, b"d" * BLOCK_BYTES, slot=0)
    reader.welcome(listener)
    reader.claim(listener)
    assert producer.sessions()["reader"] >= 1
    readers = producer.sessions()["reader"]
    reader.close()
    until(lambda: producer.sessions()["reader"] == readers - 1)
    prefill.offer("t-again-1", listener.port, b"e" * BLOCK_BYTES, slot=1)
    again = Reader(producer, b"D" * 16)
    frame = listener.receive()
    while not isinstance(frame, pm.PeerHello):
        frame = listener.receive()
    listener.send(pm.Ping(reader.token, reader.boot_id))
    again.welcome(listener)
    again.claim(listener)
    again.close()


def test_ports_that_come_and_go_never_fill_the_table(
    producer: LiveKvd, prefill: PrefillMember, consumer: LiveKvd
) -> None:
    """limits.peers is about links that rows are offered on; the others give way."""
    for turn in range(8):
        with DecodeMember(consumer, free_port()) as decode:
            hand_off(prefill, decode, f"t-ports-{turn}")
    assert len(producer.status()["peers"]) == 3
