"""Many clients, rude clients, and nonsense by the thousand: a real kvd stays small and answers."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvd.wire import messages as msg
from kvd.wire.protocol import ATTACH_SOCKET, ENGINE_SOCKET
from tests.integration.live_kvd import MIB, LiveKvd, until
from tests.integration.raw_frames import (
    LAYOUT,
    Attach,
    RawMember,
    Talker,
    as_list,
    attaching,
    digest,
    pack,
    paths,
    requests,
    save_block,
    with_value,
)

CONNECTS = 10_000


@pytest.fixture(scope="module")
def kvd() -> Iterator[LiveKvd]:
    with LiveKvd("regions.size_max=1MiB", "release.query_interval=50ms") as made:
        yield made


@pytest.fixture
def attach(kvd: LiveKvd) -> Iterator[Attach]:
    with attaching(kvd) as attach:
        yield attach


def settled(kvd: LiveKvd, num_fds: int) -> None:
    """Wait until kvd has no more descriptors than before."""
    until(lambda: kvd.num_fds() <= num_fds, f"{kvd.num_fds()} descriptors, {num_fds} before")


@pytest.mark.slow
def test_ten_thousand_connections_leave_nothing(kvd: LiveKvd) -> None:
    """Half of them to each socket; some say a word before they go."""
    Talker(kvd.runtime_dir).close()
    num_fds, sessions = kvd.num_fds(), kvd.sessions()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rss = 0
    for number in range(CONNECTS // 2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(str(kvd.runtime_dir / ATTACH_SOCKET))
            if number % 3 == 0:
                raw.send(b"\x93garbage")
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{kvd.runtime_dir / ENGINE_SOCKET}")
        if number % 100 == 0:
            dealer.send(pack(["no_such_op", number]))
            assert dealer.recv()
        dealer.close(linger=0)
        if number == CONNECTS // 8:
            rss = kvd.rss_bytes()  # whatever the first thousands needed is kept for the next
    context.term()
    settled(kvd, num_fds)
    assert kvd.sessions() == sessions
    assert kvd.rss_bytes() - rss < 16 * MIB


@pytest.mark.slow
def test_attaching_again_and_again_leaves_nothing(kvd: LiveKvd, attach: Attach) -> None:
    """Members that leave in every way in which a living process can."""
    attach("stays").hello(LAYOUT)
    num_fds = kvd.num_fds()
    for number in range(300):
        client = RawMember(kvd.runtime_dir, "e", "w", num_slots=number % 5)
        if number % 3:
            client.hello(LAYOUT)
            client.leave()
        else:
            client.close()  # without a hello the end of the connection is the end of the session
    settled(kvd, num_fds)
    assert kvd.sessions()["member"] == 1


def test_a_client_that_never_reads_costs_little(kvd: LiveKvd, attach: Attach) -> None:
    """Replies that it does not take are dropped and counted; nobody else waits for it."""
    rude, polite = attach("rude", num_slots=3), attach("polite", num_slots=3)
    rude.hello(LAYOUT)
    polite.hello(LAYOUT)
    hashes = b"".join(digest(number) for number in range(500, 600))
    for number in range(500, 600):
        save_block(polite, "r", number)
    polite.unpin("r")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.setsockopt(zmq.RCVBUF, 4096)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(f"ipc://{kvd.runtime_dir / ENGINE_SOCKET}")
    before, dropped = kvd.rss_bytes(), kvd.counter("replies_dropped")
    frame = rude.encode(msg.Lookup(*rude.head(), "q", hashes, False))
    sent = 0
    while kvd.counter("replies_dropped") < dropped + 1000:
        for _ in range(500):
            dealer.send(frame)
        sent += 500
        assert sent < 100_000
        assert polite.lookup("q", hashes[:32]) != []
    assert kvd.rss_bytes() - before < 48 * MIB
    dealer.close(linger=0)
    context.term()


def test_everything_is_answered_exactly_once(attach: Attach) -> None:
    """A thousand requests on the way at a time, good and bad ones mixed."""
    client = attach("e", num_slots=3)
    client.hello(LAYOUT)
    draw = random.Random(11)
    sent: Counter[int] = Counter()
    answered: Counter[int] = Counter()
    for _ in range(5):
        for _ in range(900):
            frame = draw.choice(requests(client)[1:])
            number = draw.choice([frame.request_no, 1 << 40, 0])
            values = with_value(as_list(frame), (1,), number)
            if draw.random() < 0.3:
                values = with_value(values, (2,), b"stranger")
            client.zmq.send(pack(values))
            sent[number] += 1
        while answered.total() < sent.total():
            answered[client.decode(client.zmq.recv()).request_no] += 1
    assert answered == sent
    assert client.zmq.poll(0) == 0


ODD: tuple[object, ...] = (
    *(0, 1, 2, 3, 7, 4096, -1, 1 << 32, 1 << 56, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1),
    *(True, False, None, "", "a", "e", "r", "t-1", "g", "running", "ended_ok", "unknown"),
    *("compute", "save", "read", "s", b"", digest(1), [], [0], [0, 0], [[0, 1]]),
)
"""Values that are right somewhere and wrong elsewhere."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_nonsense_that_decodes_never_stops_kvd(kvd: LiveKvd, attach: Attach, seed: int) -> None:
    """Good frames with a value or three exchanged: most still decode. kvd must say a code to each,
    and its books must hold whatever it took for good.
    """
    draw = random.Random(seed)
    client = attach("e", num_slots=3)
    other = attach("other", num_slots=3)
    client.hello(LAYOUT)
    other.hello(LAYOUT)
    codes: Counter[str] = Counter()
    for number in range(4000):
        frame = draw.choice(requests(client))
        values = as_list(frame)
        if draw.random() < 0.5:
            values[0] = "events"
            values[4:] = nonsense_events(draw, client)
        for _ in range(draw.choice([0, 1, 1, 2, 3])):
            places = [path for path in paths(values) if path[0] > 2]
            values = with_value(values, draw.choice(places), draw.choice(ODD))
        values[1] = number
        values[3] = 50
        client.zmq.send(pack(values))
        reply = client.decode(client.zmq.recv())
        while reply.request_no != number or isinstance(reply, msg.Query):
            assert isinstance(reply, msg.Query | msg.Error | msg.TransferOver), reply
            reply = client.decode(client.zmq.recv())
        if isinstance(reply, msg.Seen):
            client.next_no = reply.next_no
        codes[reply.code if isinstance(reply, msg.Error) else type(reply).__name__] += 1
        if number % 500 == 0:
            assert kvd.status()["invariants"]["ok"], kvd.status()["invariants"]
    assert kvd.alive(), kvd.log()
    assert len(other.reserve("r", 1)) == 1
    assert len(codes) > 8, codes
    assert "internal" not in codes


def nonsense_events(draw: random.Random, client: RawMember) -> list[Any]:
    """The body of an events frame that often is in order."""
    kinds = [
        ["acquired", 0, 0, 0, [["r", [0], 4]]],
        ["acquired", 0, 0],
        ["load_ended", 0, 0, True],
        ["written", 0, 0, 1, [["s", [0], [4]]], [["t", "127.0.0.1:1", 0, 4, [0], [0]]]],
        ["written", 0, 0, 0],
        ["computed", 0, 0],
        ["save_ended", 0, 0, "s", True, [4]],
        ["poisoned", 0, 0],
    ]
    slot = draw.randrange(3)
    assert client.page is not None
    word = client.page.load_u64(64 + 64 * slot)
    items = []
    for _ in range(draw.randrange(1, 4)):
        item = list(draw.choice(kinds))
        item[1], item[2] = slot, (word >> 8) + draw.choice([0, 0, 0, 0, 1])
        items.append(item)
    first = draw.choice([client.next_no, client.next_no, 0])
    return [client.attached.boot_id, client.incarnation, first, items]
