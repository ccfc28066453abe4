"""What a kvd's ports and links must not believe: strangers, forgeries, names of files."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvd.server.host_identity import kernel_boot_id
from kvd.wire import attach
from kvd.wire import messages as msg
from kvd.wire import peer_messages as pm
from kvd.wire.codec import attach_reply_codec, attach_request_codec
from kvd.wire.protocol import ATTACH_SOCKET
from tests.capabilities import lacking
from tests.integration.live_kvd import MIB, LiveKvd, until
from tests.integration.raw_attach import memfd
from tests.integration.raw_frames import ext, pack
from tests.integration.raw_peers import (
    QUICK,
    DecodeMember,
    PrefillMember,
    RawProducer,
    free_port,
    hand_off,
)

BOOT = b"B" * 16
NOBODY = 65_534
READ = pm.ReadName("t-forged", 0, 0, 0)
TENANCY = pm.TenancyName("p", "w", 7, 0, 0)
SOURCE = pm.SourceItem(TENANCY, "slot", [0])


@pytest.fixture(scope="module")
def producer() -> Iterator[LiveKvd]:
    with LiveKvd(*QUICK, "limits.peers=3") as made:
        yield made


@pytest.fixture(scope="module")
def consumer() -> Iterator[LiveKvd]:
    with LiveKvd(*QUICK, "limits.peers=3") as made:
        yield made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def decode(consumer: LiveKvd) -> Iterator[DecodeMember]:
    with DecodeMember(consumer, free_port()) as made:
        yield made


@pytest.fixture
def prefill(producer: LiveKvd) -> Iterator[PrefillMember]:
    with PrefillMember(producer) as made:
        yield made


@pytest.fixture
def stranger(decode: DecodeMember) -> Iterator[RawProducer]:
    """Somebody who found the port."""
    made = RawProducer(decode.port)
    yield made
    made.close()


def hello(**changes: object) -> pm.PeerHello:
    """A hello that would be in order, were there a kvd behind it."""
    fields = {
        "token": b"",
        "boot_id": BOOT,
        "protocol_min": 1,
        "protocol_max": 1,
        "kernel_boot_id": kernel_boot_id(),
        "attach_path": "/nowhere/attach.sock",
        "nonce": b"n" * 16,
    }
    return pm.PeerHello(**(fields | changes))  # type: ignore[arg-type]


def forgeries(token: bytes, boot_id: bytes, transfer: str) -> list[pm.ToConsumer]:
    """Every frame but the hello."""
    read = pm.ReadName(transfer, 0, 0, 0)
    return [
        pm.Offers(token, boot_id, [pm.OfferItem(read, 4, SOURCE)]),
        pm.Grant(token, boot_id, read, 1, SOURCE),
        pm.Revoke(token, boot_id, read, "dropped"),
        pm.PeerQuery(token, boot_id, TENANCY, read, True),
        pm.MemberGone(token, boot_id, "p", "w", 7),
        pm.Ping(token, boot_id),
    ]


# At the consumer's port ---------------------------------------------------------------------------


def test_garbage_at_a_port_is_counted_and_not_answered(
    consumer: LiveKvd, stranger: RawProducer
) -> None:
    draw = random.Random(2)
    before = consumer.refused("peer_frames.frame_malformed") + consumer.refused(
        "peer_frames.op_unknown"
    )
    messages: list[bytes | list[bytes]] = [draw.randbytes(draw.randrange(200)) for _ in range(200)]
    messages += [
        b"",
        b"\x91" * 100_000,
        struct.pack(">BI", 0xDD, 0xFFFFFFFF),
        pack(["peer_hello"]),
        pack(["peer_hello", b"", BOOT, 1, 1, 7, "x", b""]),
        pack(["offers", b"", BOOT, [[1]]]),
        pack(["offers", ext(1, b""), BOOT, []]),
        pack(["claim", b"", BOOT]),
        pack(["hello", 1, b"", 1]),
        [b"a", b"b"],
        [b"", pack(["ping", b"", BOOT])],
    ]
    for message in messages:
        stranger.send(message)

    def counted() -> int:
        refused = consumer.status()["refused"]
        return sum(refused.get(f"peer_frames.{c}", 0) for c in ("frame_malformed", "op_unknown"))

    until(lambda: counted() == before + len(messages))
    assert stranger.socket.poll(0) == 0, "somebody unknown was answered"


def test_a_frame_over_the_limit_cuts_the_connection(
    consumer: LiveKvd, decode: DecodeMember
) -> None:
    rss = consumer.rss_bytes()
    for _ in range(10):
        made = RawProducer(decode.port)
        made.send(hello(protocol_min=9, protocol_max=9))
        assert isinstance(made.receive(), pm.PeerRefused)
        made.send(b"x" * (8 * MIB))
        # It connects anew and goes on from there.
        made.send(hello(protocol_min=9, protocol_max=9))
        made.close()
    assert consumer.rss_bytes() - rss < 24 * MIB


@pytest.mark.parametrize("token", [b"", b"\0" * 16, b"guess"])
def test_frames_without_the_links_token(
    consumer: LiveKvd, prefill: PrefillMember, decode: DecodeMember, token: bytes
) -> None:
    """Under any boot id, also that of a kvd which has a link."""
    forged = f"t-forged-{len(token)}"
    hand_off(prefill, decode, f"t-before-{len(token)}")
    decode.expect(forged)
    known = bytes.fromhex(consumer.status()["peers"][0]["boot_id"])
    stranger = RawProducer(decode.port)
    before = consumer.refused("peer_frames.unauthorized")
    frames = forgeries(token, known, forged) + forgeries(token, BOOT, forged)
    for frame in frames:
        stranger.send(frame)
    until(lambda: consumer.refused("peer_frames.unauthorized") == before + len(frames))
    assert stranger.socket.poll(0) == 0
    stranger.close()
    assert consumer.status()["transfers"]["incoming_open"] == 1
    hand_off(prefill, decode, f"t-after-{len(token)}", block=1)
    assert decode.code(msg.DropTransfer(*decode.head(), forged)) == ""


def test_a_hello_from_another_host(stranger: RawProducer) -> None:
    refused = stranger.refusal(hello(kernel_boot_id="another host"))
    assert refused.code == "peer_not_local"


@pytest.mark.parametrize("versions", [(2, 9), (0, 0)])
def test_a_hello_of_another_version(stranger: RawProducer, versions: tuple[int, int]) -> None:
    refused = stranger.refusal(hello(protocol_min=versions[0], protocol_max=versions[1]))
    assert refused.code == "protocol_mismatch"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("nothing", "peer_unreachable"),
        ("file", "peer_refused"),
        ("directory", "peer_refused"),
        ("fifo", "peer_refused"),
        ("symlink", "peer_refused"),
        ("stream", "peer_unreachable"),
        ("deaf", "peer_unreachable"),
        ("silent", "peer_unreachable"),
        ("relative", "peer_refused"),
        ("other_name", "peer_refused"),
        ("long", "peer_refused"),
        ("nul", "peer_unreachable"),
        ("huge", "peer_refused"),
    ],
)
def test_attach_paths_that_are_none(
    producer: LiveKvd, stranger: RawProducer, stack: ExitStack, kind: str, code: str
) -> None:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-")))
    path = directory / ATTACH_SOCKET
    listener = stack.enter_context(
        socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM if kind == "stream" else socket.SOCK_SEQPACKET
        )
    )
    texts = {
        "relative": ATTACH_SOCKET,
        "other_name": str(directory / "control"),
        "long": f"/{'x' * 200}/{ATTACH_SOCKET}",
        "nul": f"/a\0b/{ATTACH_SOCKET}",
        "huge": "/" * (1 << 20),
    }
    if kind == "file":
        path.write_text("not a socket")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        path.symlink_to(producer.runtime_dir / ATTACH_SOCKET)
    elif kind in ("stream", "deaf", "silent", "other_name"):
        listener.bind(texts.get(kind, str(path)))
        if kind != "deaf":
            listener.listen()
    refused = stranger.refusal(hello(attach_path=texts.get(kind, str(path))))
    assert refused.code == code, refused


STRANGER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""


def test_the_attach_socket_of_another_user(stranger: RawProducer, stack: ExitStack) -> None:
    if os.getuid() != 0:
        lacking("the right to become another user", "run the tests with sudo")
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-")))
    directory.chmod(0o777)
    command = [sys.executable, "-c", STRANGER, str(directory / ATTACH_SOCKET), str(NOBODY)]
    child = stack.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"listens\n"
    refused = stranger.refusal(hello(attach_path=str(directory / ATTACH_SOCKET)))
    assert refused.code == "peer_refused"
    assert f"uid {NOBODY}" in refused.context["detail"]
    child.kill()


def test_a_nonce_that_its_kvd_never_said(
    producer: LiveKvd, consumer: LiveKvd, stranger: RawProducer
) -> None:
    """A forged hello in the name of a real kvd: that one disowns it."""
    before = producer.refused("attach.unauthorized")
    boot_id = bytes.fromhex(producer.status()["boot_id"])
    path = str(producer.runtime_dir / ATTACH_SOCKET)
    refused = stranger.refusal(hello(boot_id=boot_id, attach_path=path))
    assert (refused.code, refused.context["detail"]) == ("peer_refused", "unauthorized")
    assert producer.refused("attach.unauthorized") == before + 1
    assert consumer.refused("peer_hellos.peer_refused") > 0


def test_a_forged_hello_does_not_take_a_link_over(
    producer: LiveKvd, prefill: PrefillMember, decode: DecodeMember, stranger: RawProducer
) -> None:
    """Boot ids are no secret; what is said to a link must not go to whoever knows one."""
    hand_off(prefill, decode, "t-link-0")
    boot_id = bytes.fromhex(producer.status()["boot_id"])
    for path in (str(producer.runtime_dir / ATTACH_SOCKET), "/nowhere/attach.sock"):
        refused = stranger.refusal(hello(boot_id=boot_id, attach_path=path))
        assert refused.code in ("peer_refused", "peer_unreachable")
        hand_off(prefill, decode, f"t-link-{len(path)}")


def test_more_hellos_than_peers(consumer: LiveKvd, decode: DecodeMember, stack: ExitStack) -> None:
    """Attach paths that never answer take turns; the others are told that it is busy."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-")))
    silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    silent.bind(str(directory / ATTACH_SOCKET))
    silent.listen(100)
    strangers = [RawProducer(decode.port) for _ in range(8)]
    for number, stranger in enumerate(strangers):
        boot_id = bytes([number]) * 16
        stranger.send(hello(boot_id=boot_id, attach_path=str(directory / ATTACH_SOCKET)))
    codes = []
    for stranger in strangers:
        reply = stranger.receive()
        assert isinstance(reply, pm.PeerRefused)
        codes.append(reply.code)
        stranger.close()
    assert set(codes) == {"busy", "peer_unreachable"}
    assert codes.count("peer_unreachable") <= 3


# What a producer hands out ------------------------------------------------------------------------


class FakeKvd:
    """An attach.sock that answers as it is told, once for each connection."""

    def __init__(self, stack: ExitStack) -> None:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-"))
        self.path = str(Path(directory) / ATTACH_SOCKET)
        self._listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(10)
        self._stack = stack

    def answer(self, reply: attach.AttachReply | bytes, fds: list[int]) -> None:
        """Take one attach, and answer it."""
        connection = self._stack.enter_context(self._listener.accept()[0])
        data, got, _, _ = socket.recv_fds(connection, 1 << 16, 8)
        for fd in got:
            os.close(fd)
        request = attach_request_codec().decode(data)
        assert isinstance(request, attach.AttachReader)
        assert request.nonce == b"n" * 16
        message = reply if isinstance(reply, bytes) else attach_reply_codec().encode(reply)
        socket.send_fds(connection, [message], fds)


@pytest.mark.parametrize(
    ("reply", "size", "flags"),
    [
        (b"garbage", 0, 0),
        (b"x" * 140_000, 0, 0),
        (attach.Refused("busy"), 0, 0),
        (attach.Mapped(5), 0, 0),
        (attach.Attached(1, b"C" * 16, b"t" * 16, 0, 0), 0, 0),
        (attach.Attached(1, BOOT, b"t" * 16, 1 << 20, 0), 1 << 20, os.MFD_ALLOW_SEALING),
        (attach.Attached(1, BOOT, b"t" * 16, 1 << 20, 0), 4096, 0),
    ],
    ids=["garbage", "large", "refused", "mapped", "other-kvd", "unsealed", "small"],
)
def test_what_a_producer_answers_is_checked(
    consumer: LiveKvd, stranger: RawProducer, stack: ExitStack,
    reply: attach.AttachReply | bytes, size: int, flags: int,
) -> None:  # fmt: skip
    """Memory that could be cut short is refused: reading it would kill kvd."""
    fake = FakeKvd(stack)
    stranger.send(hello(attach_path=fake.path))
    fds = [stack.enter_context(memfd(size, flags))] if size else []
    fake.answer(reply, fds)
    refused = stranger.receive()
    assert isinstance(refused, pm.PeerRefused)
    assert refused.code in ("peer_refused", "peer_unreachable")
    until(lambda: not any("memfd:test" in name for name in consumer.descriptors()))
    assert consumer.alive()
