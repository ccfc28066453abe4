"""Calls: each has a deadline, gets its own reply or one clear refusal, whatever kvd says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_shim.client import KvdClient, KvdRefused, LinkState
from kvd.wire import messages as msg
from kvd.wire.hot_figures import LayerFigures, RequestFigures
from tests.unit.client.fake_kvd import POOL_BYTES, FakeKvd, raw
from tests.unit.client.waiting import refusal, until

Connect = Callable[..., KvdClient]
Call = Callable[[KvdClient], object]

HASH = b"h" * 32

CALLS: dict[str, Callable[[KvdClient, float], object]] = {
    "lookup": lambda c, s: c.lookup("r", [HASH], deadline_s=s),
    "reserve": lambda c, s: c.reserve("r", 1, deadline_s=s),
    "commit": lambda c, s: c.commit([1], [HASH], [4], deadline_s=s),
    "unpin": lambda c, s: c.unpin("r", deadline_s=s),
    "abort": lambda c, s: c.abort("r", deadline_s=s),
    "renew": lambda c, s: c.renew("r", deadline_s=s),
    "poison": lambda c, s: c.poison([1], deadline_s=s),
    "region_create": lambda c, s: c.region_create("g", 1, 2, 3, 4, deadline_s=s),
    "region_destroy": lambda c, s: c.region_destroy("g", deadline_s=s),
    "allocated": lambda c, s: c.allocated("g", [(1, 1)], deadline_s=s),
    "expect": lambda c, s: c.expect("t", "g", [1], 4, 1, 60, deadline_s=s),
    "await_transfer": lambda c, s: c.await_transfer("t", deadline_s=s),
    "drop_transfer": lambda c, s: c.drop_transfer("t", deadline_s=s),
    "stats": lambda c, s: c.stats({"x": 1.0}, deadline_s=s),
    "goodbye": lambda c, s: c.goodbye(deadline_s=s),
}

FRAMES: dict[str, type] = {
    "lookup": msg.Lookup,
    "reserve": msg.Reserve,
    "commit": msg.Commit,
    "unpin": msg.Unpin,
    "abort": msg.Abort,
    "renew": msg.Renew,
    "poison": msg.Poison,
    "region_create": msg.RegionCreate,
    "region_destroy": msg.RegionDestroy,
    "allocated": msg.Allocated,
    "expect": msg.Expect,
    "await_transfer": msg.AwaitTransfer,
    "drop_transfer": msg.DropTransfer,
    "stats": msg.Stats,
    "goodbye": msg.Goodbye,
}


# What goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_every_call_ends_at_its_deadline(connect: Connect, kvd: FakeKvd, name: str) -> None:
    client = connect()
    kvd.silent_on(FRAMES[name])
    began = time.monotonic()
    error = refusal(lambda: CALLS[name](client, 0.02))
    assert error.code == "deadline_exceeded"
    assert 0.02 <= time.monotonic() - began < 2
    assert client.state is LinkState.ATTACHED
    assert client.statistics().requests["deadline_exceeded"] == 1
    assert client.statistics().requests_open == 0


@pytest.mark.parametrize("name", CALLS)
def test_every_call_brings_kvds_refusal(connect: Connect, kvd: FakeKvd, name: str) -> None:
    client = connect()
    kvd.on(
        FRAMES[name],
        lambda frame: msg.Error(
            frame.request_no, kvd.boot_id, "limit_reached", {"what": "requests", "value": "9"}
        ),
    )
    error = refusal(lambda: CALLS[name](client, 5))
    assert error.code == "limit_reached"
    assert error.context == {"what": "requests", "value": "9"}
    assert str(error) == "limit_reached: kvd refused (what=requests, value=9)."


@pytest.mark.parametrize("name", CALLS)
def test_every_call_refuses_the_reply_of_another_operation(
    connect: Connect, kvd: FakeKvd, name: str
) -> None:
    client = connect()
    kvd.on(
        FRAMES[name], lambda frame: msg.HelloOk(frame.request_no, kvd.boot_id, 1, 0, 0, [], 0, 1, 1)
    )
    error = refusal(lambda: CALLS[name](client, 5))
    assert error.code == "frame_malformed"
    assert "HelloOk" in str(error)


def test_late_reply_is_counted_and_reaches_nobody(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    late = kvd.silent_on(msg.Lookup)
    refusal(lambda: client.lookup("r", [HASH], deadline_s=0.01))
    kvd.as_usual(msg.Lookup)
    kvd.tell(msg.Found(late[0].request_no, kvd.boot_id, [9]))
    kvd.tell(msg.Done(4711, kvd.boot_id))
    assert client.lookup("r", [HASH]) == [1, 2]
    assert client.statistics().replies_unknown == 2


def test_garbage_is_counted_and_disturbs_nobody(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    for garbage in (b"", b"\xc1", raw(["nonsense"]), raw({"a": 1}), os.urandom(64)):
        kvd.tell(garbage)
    assert client.lookup("r", [HASH]) == [1, 2]
    assert client.statistics().replies_malformed == 5


def test_garbage_in_answer_to_a_request_ends_that_request(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.on(msg.Lookup, lambda frame: raw(["found", frame.request_no, "no boot id"]))
    error = refusal(lambda: client.lookup("r", [HASH]))
    assert error.code == "frame_malformed"
    assert client.reserve("r", 1) == [1, 2]


def test_frame_over_kvds_limit_is_refused_before_it_is_sent(connect: Connect, kvd: FakeKvd) -> None:
    kvd.frame_bytes_max = 4096
    client = connect()
    error = refusal(lambda: client.lookup("r", [HASH] * 128))
    assert error.code == "frame_too_large"
    assert "4096" in str(error)
    assert not kvd.of(msg.Lookup)
    assert client.statistics().requests_open == 0
    assert client.lookup("r", [HASH] * 64) == [1, 2]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.lookup("r", [HASH, b"short"]), r"hashes\[1\] has 5 bytes"),
        (lambda c: c.commit([1, 2], [HASH], [4, 4]), "2 blocks, 1 hashes"),
    ],
)
def test_bad_arguments_name_the_field(connect: Connect, call: Call, says: str) -> None:
    client = connect()
    with pytest.raises(KvdRefused, match=says):
        call(client)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_deadline_that_is_none_is_refused(connect: Connect, seconds: float) -> None:
    client = connect()
    with pytest.raises(ValueError, match="deadline_s"):
        client.lookup("r", [HASH], deadline_s=seconds)


def test_codes_that_do_not_match_the_items(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.on(msg.Commit, lambda frame: msg.Statuses(frame.request_no, kvd.boot_id, ["", "x"]))
    assert refusal(lambda: client.commit([1], [HASH], [4])).code == "frame_malformed"


def test_too_many_calls_wait_for_their_turn_and_then_are_busy(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect(requests_max=1)
    asked = kvd.silent_on(msg.AwaitTransfer)
    tokens: list[int] = []
    first = threading.Thread(target=lambda: tokens.append(client.await_transfer("t")))
    first.start()
    until(lambda: bool(asked))
    error = refusal(lambda: client.lookup("r", [HASH], deadline_s=0.02))
    assert error.code == "busy"
    assert "limit of 1" in str(error)
    turns: list[list[int]] = []
    second = threading.Thread(target=lambda: turns.append(client.lookup("r", [HASH])))
    second.start()
    kvd.tell(msg.TransferOver(asked[0].request_no, kvd.boot_id, 5))
    first.join()
    second.join()
    assert (tokens, turns) == ([5], [[1, 2]])


def test_closed_client_refuses(connect: Connect) -> None:
    client = connect()
    client.close()
    assert refusal(lambda: client.lookup("r", [HASH])).code == "closed"
    assert refusal(lambda: client.slots.acquire(0)).code == "closed"


def test_close_ends_who_waits(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.silent_on(msg.AwaitTransfer)
    errors: list[str] = []
    thread = threading.Thread(
        target=lambda: errors.append(refusal(lambda: client.await_transfer("t")).code)
    )
    thread.start()
    until(lambda: bool(kvd.of(msg.AwaitTransfer)))
    client.close()
    thread.join()
    assert errors == ["closed"]


def test_forked_child_is_refused_and_leaves_the_parent_alone(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            client.lookup("r", [HASH])
        except KvdRefused as error:
            client.close()
            code = 0 if error.code == "process_forked" else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert client.lookup("r", [HASH]) == [1, 2]


# What goes right ------------------------------------------------------------------------------


def test_requests_carry_token_and_time_left(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    client.lookup("r", [HASH, HASH], pin=False, deadline_s=3)
    (frame,) = kvd.of(msg.Lookup)
    assert isinstance(frame, msg.Lookup)
    assert frame.token == kvd._token
    assert 2000 < frame.deadline_ms_left <= 3000
    assert (frame.request, frame.hashes, frame.pin) == ("r", HASH + HASH, False)


def test_every_operation_says_what_it_is_told(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    assert client.reserve("r", 2) == [1, 2]
    assert client.commit([1, 2], [HASH, HASH], [4, 3], request="r") == ["", ""]
    client.unpin("r", [1])
    client.unpin("r")
    client.abort("r")
    client.renew("r")
    client.poison([3])
    assert client.allocated("g", [(1, 5)]) == [""]
    client.expect("t", "g", [1, 2], 7, 3, 1.5)
    assert client.await_transfer("t") == 7
    client.drop_transfer("t", peer="h:1")
    layer = LayerFigures(3, 9, 1, 2, 4.5, 0.8)
    client.stats({"steps": 2.0}, layers=[layer], requests=[RequestFigures("r", 5, 9, 1, 2)])
    told = [
        (type(frame).__name__, [getattr(frame, name) for name in frame.__struct_fields__[3:]])
        for frame in kvd.frames[1:]
    ]
    assert told == [
        ("Reserve", ["r", 2]),
        ("Commit", [[1, 2], HASH + HASH, [4, 3], "r"]),
        ("Unpin", ["r", [1]]),
        ("Unpin", ["r", None]),
        ("Abort", ["r"]),
        ("Renew", ["r"]),
        ("Poison", [[3]]),
        ("Allocated", ["g", [(1, 5)]]),
        ("Expect", ["t", "g", [1, 2], 7, 3, 1500]),
        ("AwaitTransfer", ["t"]),
        ("DropTransfer", ["t", "h:1"]),
        ("Stats", [{"steps": 2.0}, [layer], [RequestFigures("r", 5, 9, 1, 2, 0.0, None, [])]]),
    ]


def test_long_lists_are_sent_in_parts(connect: Connect, kvd: FakeKvd) -> None:
    kvd.items_max = 4
    client = connect()
    kvd.on(
        msg.Commit,
        lambda frame: msg.Statuses(
            frame.request_no, kvd.boot_id, ["dup" if b == 5 else "" for b in frame.blocks]
        ),
    )
    codes = client.commit(list(range(10)), [HASH] * 10, [4] * 10)
    assert codes == [""] * 5 + ["dup"] + [""] * 4
    assert [len(frame.blocks) for frame in kvd.of(msg.Commit)] == [4, 4, 2]
    client.poison(range(5))
    assert len(kvd.of(msg.Poison)) == 2


def num_mappings() -> int:
    """Mappings of the fake's memory in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:fake-pool")


def test_region_is_mapped_once_and_given_back(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    region = client.region_create("g", 1, 2, 3, 4)
    assert region.size == POOL_BYTES
    region.write_bytes(0, b"rows")
    mapped = num_mappings()
    assert client.region_create("g", 1, 2, 3, 4) is region
    assert num_mappings() == mapped
    assert not region.closed
    view = region.view()
    with pytest.raises(BufferError):
        client.region_destroy("g")
    assert not kvd.of(msg.RegionDestroy)
    view.release()
    client.region_destroy("g")
    assert region.closed
    again = client.region_create("g", 1, 2, 3, 4)
    assert again is not region
    assert again.read_bytes(0, 4) == b"rows"


def test_goodbye_closes_without_attaching_again(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()

    def leave(frame: msg.Goodbye) -> msg.ServerFrame:
        kvd._hang_up()
        return msg.Done(frame.request_no, kvd.boot_id)

    kvd.on(msg.Goodbye, leave)
    client.goodbye()
    assert client.state is LinkState.CLOSED
    assert len(kvd.attaches) == 1


def test_two_threads_hammering_get_their_own_answers(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.on(msg.Reserve, lambda frame: msg.Taken(frame.request_no, kvd.boot_id, [frame.count]))
    wrong: list[object] = []

    def hammer(first: int) -> None:
        for count in range(first, first + 300):
            got = client.reserve(f"r{count}", count)
            if got != [count]:
                wrong.append(got)

    threads = [threading.Thread(target=hammer, args=(start,)) for start in (1, 10_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    statistics = client.statistics()
    assert statistics.requests == {"ok": 600}
    assert statistics.replies_unknown == 0
