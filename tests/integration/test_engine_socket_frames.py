"""Frames that are none, on the engine.sock of a real kvd: refused, counted, and nothing else.

Beside whoever sends them another engine works all the time: it must not notice.
"""

from __future__ import annotations

import pickle
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvd.wire import messages as msg
from tests.integration.live_kvd import MIB, LiveKvd
from tests.integration.raw_frames import (
    HASH,
    LAYOUT,
    RawMember,
    Talker,
    as_list,
    ext,
    pack,
    paths,
    requests,
    value_at,
    with_value,
)

FRAME_MAX = 256 << 10
FRAME_CODES = ("frame_malformed", "op_unknown")
OPTIONAL = {
    "hello": 5,
    "lookup": 1,
    "commit": 1,
    "unpin": 1,
    "events": 1,
    "drop_transfer": 1,
    "stats": 2,
}
"""Trailing fields that a client of the first version of the protocol need not send."""


@pytest.fixture(scope="module")
def kvd() -> Iterator[LiveKvd]:
    size = f"server.frame_size_max={FRAME_MAX // 1024}KiB"
    with LiveKvd(size, "limits.blocks_per_request=4096") as made:
        yield made


@pytest.fixture
def stranger(kvd: LiveKvd) -> Iterator[Talker]:
    """A client that has not attached."""
    with Talker(kvd.runtime_dir) as talker:
        yield talker


@pytest.fixture
def member(kvd: LiveKvd) -> Iterator[RawMember]:
    with RawMember(kvd.runtime_dir, "e") as client:
        client.hello(LAYOUT)
        yield client


@pytest.fixture(autouse=True)
def witness(kvd: LiveKvd) -> Iterator[None]:
    """An engine that works before and after, with what it had before."""
    with RawMember(kvd.runtime_dir, "witness") as client:
        client.hello(LAYOUT)
        blocks = client.reserve("w", 2)
        yield
        assert client.lookup("w2", HASH) == []
        assert len({*client.reserve("w", 2), *blocks}) == 4
        client.unpin("w")
    assert kvd.status()["invariants"]["ok"]


def counted(kvd: LiveKvd) -> dict[str, int]:
    """Refusals of frames so far."""
    refused = kvd.status()["refused"]
    return {code: refused.get(f"frames.{code}", 0) for code in (*FRAME_CODES, "frame_too_large")}


def answers(talker: Talker, frames: list[bytes]) -> list[msg.Error]:
    """The answers to frames that are all refused: one each, in order, and no other."""
    for frame in frames:
        talker.send(frame)
    got = [talker.receive() for _ in frames]
    last = talker.refusal(pack(["no_such_op", 987_654_321]))
    assert last.request_no == 987_654_321, "something was answered twice"
    made = [reply for reply in got if isinstance(reply, msg.Error)]
    assert len(made) == len(frames)
    return made


# What is no frame at all --------------------------------------------------------------------------


def test_random_bytes_are_refused_one_by_one(kvd: LiveKvd, stranger: Talker) -> None:
    draw = random.Random(7)
    before = counted(kvd)
    frames = [draw.randbytes(draw.randrange(1, 200)) for _ in range(500)]
    refused = answers(stranger, frames)
    assert {error.code for error in refused} <= set(FRAME_CODES)
    after = counted(kvd)
    assert sum(after.values()) - sum(before.values()) == len(frames) + 1


def test_random_bytes_behind_a_good_beginning_keep_their_number(stranger: Talker) -> None:
    draw = random.Random(8)
    head = pack(["lookup", 77, b"", 1000, "r"])[1:]
    frames = [b"\x96" + head + draw.randbytes(draw.randrange(1, 50)) for _ in range(200)]
    codes = {(e.code, e.request_no) for e in answers(stranger, frames)}
    assert ("frame_malformed", 77) in codes
    assert codes <= {("frame_malformed", 77), ("unauthorized", 77)}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\xc0",
        pack("lookup"),
        pack({"op": "lookup"}),
        pack([]),
        pack([1, 2, 3]),
        pack([None, 5]),
        pack(["lookup"]),
        pickle.dumps(["lookup", 5, b"", 1000, "r", HASH]),
        pack(ext(5, b"lookup")),
        pack([ext(1, b"x"), 5]),
        pack([ext(-1, b""), 5]),
        struct.pack(">BI", 0xDD, 0xFFFFFFFF),
        struct.pack(">BI", 0xDF, 0xFFFFFFFF),
        struct.pack(">BI", 0xC6, 0xFFFFFFFF),
        struct.pack(">BI", 0xDB, 0x7FFFFFFF),
    ],
    ids=lambda frame: frame[:12].hex() or "empty",
)
def test_what_is_no_request_is_malformed(stranger: Talker, frame: bytes) -> None:
    error = stranger.refusal(frame)
    assert (error.code, error.request_no) == ("frame_malformed", 0)


@pytest.mark.parametrize("op", ["", "no_such_op", "HELLO", "found", "x" * 60_000, "\x00", "é" * 40])
def test_unknown_operations_are_named(stranger: Talker, op: str) -> None:
    error = stranger.refusal(pack([op, 5, b"", 1000]))
    if 0 < len(op) < 256:
        assert error == msg.Error(5, error.boot_id, "op_unknown", {"op": op[:64]})
    else:
        assert error.code == "frame_malformed"


@pytest.mark.parametrize("parts", [[b""], [b"", b"x"], [b"a"] * 50, [b"x" * 60_000] * 20])
def test_messages_of_several_parts_are_refused(stranger: Talker, parts: list[bytes]) -> None:
    frame = pack(["lookup", 31, b"", 1000, "r", HASH])
    error = stranger.refusal(*parts, frame)
    assert (error.code, error.request_no) == ("frame_malformed", 31)
    assert error.context["detail"] == f"{len(parts) + 1} parts, not 1"


@pytest.mark.parametrize("depth", [10, 1000, FRAME_MAX // 2])
@pytest.mark.parametrize("where", ["top", "field", "appended"])
def test_nesting_costs_nothing(stranger: Talker, kvd: LiveKvd, depth: int, where: str) -> None:
    nested = b"\x91" * depth + b"\xc0"
    frame = {
        "top": nested,
        "field": b"\x95" + pack(["poison", 9, b"", 1])[1:] + nested,
        "appended": b"\x96" + pack(["poison", 9, b"", 1, [3]])[1:] + nested,
    }[where]
    error = stranger.refusal(frame)
    assert error.request_no == (0 if where == "top" else 9)
    # What is appended is skipped, whatever it is; only nesting without end is refused.
    ok = "unauthorized" if where == "appended" and depth == 10 else "frame_malformed"
    assert error.code == ok


@pytest.mark.parametrize("size", [1 << 20, 1 << 28, (1 << 32) - 1])
@pytest.mark.parametrize("head", [0xDD, 0xDF])
def test_a_length_that_lies_takes_no_memory(
    kvd: LiveKvd, stranger: Talker, head: int, size: int
) -> None:
    before = kvd.rss_bytes()
    op = ["poison" if head == 0xDD else "stats", 12, b"", 1000]
    frame = b"\x95" + pack(op)[1:] + struct.pack(">BI", head, size) + b"\x01" * 1000
    error = stranger.refusal(frame)
    assert (error.code, error.request_no) == ("frame_malformed", 12)
    assert kvd.rss_bytes() - before < 16 * MIB


# Frames that were good once -----------------------------------------------------------------------


def test_cut_frames_are_refused_under_their_number(stranger: Talker, member: RawMember) -> None:
    for frame in requests(member):
        whole = member.encode(frame)
        op, number, *_ = as_list(frame)
        head = (1 if len(as_list(frame)) < 16 else 3) + len(pack(op)) + len(pack(number))
        cuts = [whole[:length] for length in range(len(whole))]
        for length, error in enumerate(answers(stranger, cuts)):
            assert error.code == "frame_malformed"
            assert error.request_no == (frame.request_no if length >= head else 0), length


@pytest.mark.parametrize("wrong", [{1: 2}, ext(3, b"x"), 1.5, -1], ids=repr)
def test_wrong_types_in_every_field(member: RawMember, wrong: object) -> None:
    """Each value of each request becomes something that no field is. -1 and 1.5 fit a few."""
    fits = {-1: (8, 4), 1.5: (1, 1)}
    accepted = 0
    for frame in requests(member):
        values = as_list(frame)
        for path in paths(values):
            if isinstance(value_at(values, path), dict) and isinstance(wrong, dict):
                continue
            reply = member.raw(pack(with_value(values, path, wrong)))
            assert isinstance(reply, msg.ServerFrame)
            if isinstance(reply, msg.Error) and reply.code == "frame_malformed":
                assert reply.request_no == (0 if path in ((0,), (1,)) else frame.request_no)
            else:
                accepted += 1
    assert (
        accepted <= fits.get(wrong, (0, 0))[0] if isinstance(wrong, int | float) else not accepted
    )


def test_wrong_kinds_of_text_and_bytes(member: RawMember) -> None:
    """Text where bytes belong, bytes where text belongs, text that is not UTF-8."""
    for frame in requests(member):
        values = as_list(frame)
        for path in paths(values):
            value = value_at(values, path)
            if path == (0,) or not isinstance(value, str | bytes):
                continue
            wrong: object = value.encode() if isinstance(value, str) else value.hex()
            reply = member.raw(pack(with_value(values, path, wrong)))
            assert isinstance(reply, msg.Error)
            assert (reply.code, reply.request_no) == ("frame_malformed", frame.request_no), path
    text = pack(["lookup", 4, member.attached.token, 1000, "??", HASH]).replace(b"??", b"\xff\xfe")
    reply = member.raw(text)
    assert isinstance(reply, msg.Error)
    assert (reply.code, reply.request_no) == ("frame_malformed", 4)
    assert "UTF-8" in reply.context["detail"]


@pytest.mark.parametrize(
    "name", ["e\n", "a b", "../../etc/passwd", "", "x" * 129, "a/b", "é\u202e", "a\x00b"]
)
def test_names_that_are_none(member: RawMember, name: str) -> None:
    for frame in (
        ["region_create", 7, b"", 1000, name, 1, 1, 4, 16],
        ["stats", 7, b"", 1, {name: 1}],
    ):
        reply = member.raw(pack(frame))
        assert isinstance(reply, msg.Error)
        assert (reply.code, reply.request_no) == ("frame_malformed", 7)


# Other versions -----------------------------------------------------------------------------------


def test_appended_fields_are_ignored(kvd: LiveKvd) -> None:
    outcomes = []
    for later in ([], ["later", [1, {"a": None}], ext(1, b"x")]):
        with RawMember(kvd.runtime_dir, "e") as client:
            client.hello(LAYOUT)
            frames = [as_list(frame) + later for frame in requests(client)]
            outcomes.append([outcome(client.raw(pack(frame))) for frame in frames])
    assert outcomes[0] == outcomes[1]
    assert "frame_malformed" not in outcomes[0]


def test_optional_fields_may_be_missing(member: RawMember) -> None:
    for frame in requests(member):
        values = as_list(frame)
        missing = OPTIONAL.get(values[0], 0)
        reply = member.raw(pack(values[: len(values) - missing]))
        assert not (isinstance(reply, msg.Error) and reply.code == "frame_malformed"), frame
        short = member.raw(pack(values[: len(values) - missing - 1]))
        assert isinstance(short, msg.Error)
        assert (short.code, short.request_no) == ("frame_malformed", frame.request_no)


def outcome(reply: msg.ServerFrame) -> str:
    return reply.code if isinstance(reply, msg.Error) else type(reply).__name__


# Large ones ---------------------------------------------------------------------------------------


def test_a_frame_over_the_limit_is_refused_under_its_number(
    kvd: LiveKvd, member: RawMember
) -> None:
    before = counted(kvd)["frame_too_large"]
    bare = len(pack(["lookup", 200, member.attached.token, 1000, "r", b"x" * (1 << 17)])) - (
        1 << 17
    )
    for size in (FRAME_MAX, FRAME_MAX + 1):
        reply = member.raw(
            pack(["lookup", 200, member.attached.token, 1000, "r", b"\0" * (size - bare)])
        )
        assert reply.request_no == 200
        if size > FRAME_MAX:
            assert isinstance(reply, msg.Error)
            assert reply.code == "frame_too_large"
            assert reply.context == {"size": str(size), "limit": str(FRAME_MAX)}
    assert counted(kvd)["frame_too_large"] == before + 1


def test_a_frame_far_over_the_limit_cuts_the_connection(kvd: LiveKvd) -> None:
    rss = kvd.rss_bytes()
    for _ in range(20):
        with Talker(kvd.runtime_dir) as talker, disconnects(talker) as monitor:
            assert talker.refusal(pack(["no_such_op", 4])).request_no == 4
            talker.send(b"x" * (8 * MIB))
            assert monitor.poll(10_000), "the connection was not cut"
    assert kvd.rss_bytes() - rss < 24 * MIB


@contextmanager
def disconnects(talker: Talker) -> Iterator[zmq.Socket[bytes]]:
    """A socket that is readable once the talker has lost its connection."""
    monitor = talker.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        yield monitor
    finally:
        talker.socket.disable_monitor()
        monitor.close(linger=0)


def test_many_large_frames_take_no_more_memory_than_a_few(kvd: LiveKvd, stranger: Talker) -> None:
    frame = pack(["lookup", 1, b"", 1000, "r", b"\0" * (FRAME_MAX + 1000)])
    answers(stranger, [frame] * 20)
    rss = kvd.rss_bytes()
    answers(stranger, [frame] * 400)
    assert kvd.rss_bytes() - rss < 32 * MIB
