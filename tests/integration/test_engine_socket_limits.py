"""Every limit of a real kvd, at the limit and one beyond: what was admitted before goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvd.wire import messages as msg
from kvd.wire.hot_figures import LAYERS_MAX, LayerFigures, RequestFigures
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    PoisonedItem,
    ReadItem,
    SlotItem,
    WrittenItem,
)
from tests.integration.live_kvd import LiveKvd
from tests.integration.raw_frames import (
    LAYOUT,
    ROW,
    TOKENS,
    Attach,
    RawMember,
    attaching,
    digest,
    epochs,
    refusal,
    save_block,
)

LIMITS = {
    "engines": 3,
    "members_per_engine": 2,
    "slots_per_member": 4,
    "readers_per_slot": 2,
    "requests_per_engine": 3,
    "blocks_per_request": 5,
    "batch_items": 8,
    "waiters": 2,
    "transfers": 3,
    "regions": 2,
    "sessions": 5,
}
STATS_MAX = 512


@pytest.fixture(scope="module")
def kvd() -> Iterator[LiveKvd]:
    settings = [f"limits.{key}={value}" for key, value in LIMITS.items()]
    with LiveKvd(*settings, "regions.size_max=1MiB") as made:
        yield made


@pytest.fixture
def attach(kvd: LiveKvd) -> Iterator[Attach]:
    with attaching(kvd) as attach:
        yield attach


@pytest.fixture
def member(attach: Attach) -> RawMember:
    """A member with three slots that has said hello."""
    client = attach(num_slots=3)
    client.hello(LAYOUT)
    return client


def over(code: str, limit: int, context: dict[str, str]) -> bool:
    """Whether a refusal names the limit that it is about."""
    return code in ("limit_reached", "busy") and context["limit"] == str(limit)


def is_over(reply: msg.ServerFrame, limit: int) -> bool:
    return isinstance(reply, msg.Error) and over(reply.code, limit, reply.context)


# Processes ----------------------------------------------------------------------------------------


def test_engines(attach: Attach) -> None:
    """The hello of one more is refused; it may come as soon as another has left."""
    clients = [attach(f"e{number}") for number in range(LIMITS["engines"] + 1)]
    for client in clients[:-1]:
        client.hello(LAYOUT)
    error = refusal(lambda: clients[-1].hello(LAYOUT))
    assert over(error.code, LIMITS["engines"], error.context)
    assert len(clients[0].reserve("r", 1)) == 1
    clients[0].leave()
    clients[-1].hello(LAYOUT)


def test_members_of_an_engine(attach: Attach) -> None:
    clients = [attach("e", f"w{number}") for number in range(LIMITS["members_per_engine"] + 1)]
    for client in clients[:-1]:
        client.hello(LAYOUT)
    error = refusal(lambda: clients[-1].hello(LAYOUT))
    assert over(error.code, LIMITS["members_per_engine"], error.context)
    clients[1].leave()
    clients[-1].hello(LAYOUT)


def test_slots_of_a_member(attach: Attach) -> None:
    limit = LIMITS["slots_per_member"]
    attach("e", num_slots=limit).hello(LAYOUT)
    for number in (limit + 1, 1 << 40):
        error = refusal(lambda number=number: attach("f", num_slots=number))  # type: ignore[misc]
        assert over(error.code, limit, error.context)


def test_sessions(kvd: LiveKvd, attach: Attach) -> None:
    """Who attached already may also attach again when there is no room for others."""
    limit = LIMITS["sessions"]
    clients = [attach("e", f"w{number}") for number in range(limit)]
    error = refusal(lambda: attach("e", "w-more"))
    assert (error.code, error.context["limit"]) == ("busy", str(limit))
    assert kvd.sessions()["member"] == limit
    again = RawMember(kvd.runtime_dir, "e", "w0", incarnation=clients[0].incarnation)
    assert kvd.sessions()["member"] == limit
    assert clients[0].code(msg.Goodbye(*clients[0].head())) == "unauthorized"
    again.hello(LAYOUT)
    again.leave()
    attach("e", "w-more")


# Requests and blocks ------------------------------------------------------------------------------


def test_requests_of_an_engine(member: RawMember) -> None:
    limit = LIMITS["requests_per_engine"]
    for number in range(limit):
        member.reserve(f"r{number}", 1)
    error = refusal(lambda: member.reserve("r-more", 1))
    assert over(error.code, limit, error.context)
    assert len(member.reserve("r0", 1)) == 1
    member.unpin("r0")
    member.reserve("r-more", 1)


def test_blocks_of_a_request(kvd: LiveKvd, member: RawMember) -> None:
    limit = LIMITS["blocks_per_request"]
    error = refusal(lambda: member.reserve("r", limit + 1))
    assert over(error.code, limit, error.context)
    assert kvd.status()["pool"]["blocks"]["filling"] == 0
    member.reserve("r", limit)
    error = refusal(lambda: member.reserve("r", 1))
    assert over(error.code, limit, error.context)
    member.reserve("q", limit)


def test_blocks_that_a_lookup_finds(kvd: LiveKvd, member: RawMember) -> None:
    """A prefix that is longer than a request may be is refused, and leaves no request behind."""
    limit = LIMITS["blocks_per_request"]
    for number in range(limit + 1):
        save_block(member, f"r{number % 2}", 900 + number)
    hashes = b"".join(digest(900 + number) for number in range(limit + 1))
    member.unpin("r0")
    member.unpin("r1")
    for _ in range(2 * LIMITS["requests_per_engine"]):
        error = refusal(lambda: member.lookup(os.urandom(4).hex(), hashes))
        assert over(error.code, limit, error.context)
    assert kvd.status()["engines"][0]["requests"] == 0
    assert len(member.lookup("q", hashes[:-32])) == limit


def test_blocks_of_a_transfer(member: RawMember) -> None:
    limit = LIMITS["blocks_per_request"]
    member.call(msg.RegionCreate(*member.head(), "g", 1, 64, TOKENS, ROW))
    blocks = list(range(limit + 1))
    frame = msg.Expect(*member.head(), "t-blocks", "g", blocks, TOKENS, 1, 1000)
    assert is_over(member.raw(member.encode(frame)), limit)
    member.call(msg.Expect(*member.head(), "t-blocks", "g", blocks[:-1], TOKENS, 1, 1000))


def test_items_of_a_batch(member: RawMember) -> None:
    """A larger one is refused, and nothing of it is done."""
    limit = LIMITS["batch_items"]
    pairs: list[SlotItem] = []
    for epoch in range(limit):
        pairs += [AcquiredItem(0, epoch), ComputedItem(0, epoch)]
    error = refusal(lambda: member.events(pairs[: limit + 1]))
    assert over(error.code, limit, error.context)
    assert epochs(member) == [0, 0, 0]
    assert member.events(pairs[:limit]) == []
    assert epochs(member) == [limit // 2, 0, 0]

    numbers = list(range(limit + 1))
    commit = msg.Commit(*member.head(), numbers, digest(1) * (limit + 1), [1] * (limit + 1))
    assert is_over(member.raw(member.encode(commit)), limit)
    poison = msg.Poison(*member.head(), numbers)
    assert is_over(member.raw(member.encode(poison)), limit)
    member.call(msg.RegionCreate(*member.head(), "g", 1, 64, TOKENS, ROW))
    allocated = msg.Allocated(*member.head(), "g", [(block, 1) for block in numbers])
    assert is_over(member.raw(member.encode(allocated)), limit)
    member.call(msg.Allocated(*member.head(), "g", [(block, 1) for block in numbers[:-1]]))


def test_events_are_remembered_as_far_back_as_a_batch(member: RawMember) -> None:
    limit = LIMITS["batch_items"]
    items: list[SlotItem] = [PoisonedItem(9, 0)] * limit
    assert member.events(items) == ["slot_unknown"] * limit
    assert member.events([PoisonedItem(9, 0)]) == ["slot_unknown"]
    reply = member.call(member.events_frame(items, 1))
    assert isinstance(reply, msg.Seen)
    assert reply.codes == ["slot_unknown"] * limit
    assert refusal(lambda: member.call(member.events_frame(items, 0))).code == "out_of_order"


def test_figures_of_a_member(member: RawMember) -> None:
    """A refused frame leaves the figures that were there."""
    figures = {f"x{number}": 1.0 for number in range(STATS_MAX)}
    for _ in range(3):
        assert member.code(msg.Stats(*member.head(), figures)) == ""
    reply = member.raw(member.encode(msg.Stats(*member.head(), figures | {"y": 1.0})))
    assert is_over(reply, STATS_MAX)


def test_layers_and_requests_of_a_member(kvd: LiveKvd, member: RawMember) -> None:
    """The last frame counts; one with too many is refused and changes nothing."""
    layers = [LayerFigures(at, 1, 1, 1) for at in range(LAYERS_MAX)]
    requests = [RequestFigures(f"r{at}", 1, 1, 1, 1, 0.0, 1.0, layers) for at in range(8)]
    assert member.code(msg.Stats(*member.head(), {}, layers, requests)) == ""
    too_many = [
        msg.Stats(*member.head(), {}, [*layers, layers[0]]),
        msg.Stats(*member.head(), {}, [], [*requests, requests[0]]),
    ]
    for frame in too_many:
        reply = member.raw(member.encode(frame))
        assert isinstance(reply, msg.Error)
        assert reply.code == "frame_malformed"
    (seen,) = kvd.get("/v1/engines")[1]["items"][0]["members"]
    assert len(seen["hot_layers"]) == LAYERS_MAX
    assert [len(one["layers"]) for one in seen["hot_requests"]] == [LAYERS_MAX] * 8
    assert len(kvd.status()["engines"][0]["hot_requests"]) == 8
    assert member.code(msg.Stats(*member.head(), {})) == ""
    assert kvd.status()["engines"][0]["hot_requests"] == []


def test_figures_that_are_no_numbers(kvd: LiveKvd, member: RawMember) -> None:
    odd = {"spare_left": float("nan"), "b": float("inf"), "c": -1e308}
    assert member.code(msg.Stats(*member.head(), odd)) == ""
    assert kvd.get("/readyz")[0] == 200
    assert kvd.status()["engines"][0]["spare_left"] is None
    assert kvd.get("/metrics")[0] == 200


# Transfers ----------------------------------------------------------------------------------------


def read(transfer: str, start: int = 0) -> ReadItem:
    # Nobody listens there: the offers stay open.
    return ReadItem(transfer, "127.0.0.1:1", start, start + TOKENS, [start // TOKENS])


def test_readers_of_a_slot(kvd: LiveKvd, member: RawMember) -> None:
    limit = LIMITS["readers_per_slot"]
    reads = [read("t-readers", TOKENS * number) for number in range(limit + 1)]
    before = epochs(member)
    assert member.events([WrittenItem(0, before[0], 0, [], reads)]) == ["limit_reached"]
    assert kvd.status()["slots"]["held"] == 0
    assert member.events([WrittenItem(0, before[0], 0, [], reads[:limit])]) == []
    assert kvd.status()["transfers"]["reads_open"] == limit
    assert member.code(msg.DropTransfer(*member.head(), "t-readers")) == ""


def test_transfers_that_leave(kvd: LiveKvd, attach: Attach) -> None:
    limit = LIMITS["transfers"]
    member = attach(num_slots=limit + 1)
    member.hello(LAYOUT)
    items = [WrittenItem(slot, 0, 0, [], [read(f"t-out{slot}")]) for slot in range(limit + 1)]
    assert member.events(items) == [*[""] * limit, "limit_reached"]
    assert kvd.status()["transfers"]["outgoing_open"] == limit
    assert kvd.status()["slots"]["held"] == limit
    assert member.code(msg.DropTransfer(*member.head(), "t-out0")) == ""
    assert member.events([items[-1]]) == []


def test_transfers_that_arrive(kvd: LiveKvd, member: RawMember) -> None:
    limit = LIMITS["transfers"]
    member.call(msg.RegionCreate(*member.head(), "g", 1, 64, TOKENS, ROW))

    def expect(number: int) -> msg.ServerFrame:
        frame = msg.Expect(*member.head(), f"t-in{number}", "g", [number], TOKENS, 1, 60_000)
        return member.raw(member.encode(frame))

    for number in range(limit):
        assert isinstance(expect(number), msg.Done)
    assert is_over(expect(limit), limit)
    assert isinstance(expect(0), msg.Done)
    assert member.code(msg.DropTransfer(*member.head(), "t-in0")) == ""
    assert isinstance(expect(limit), msg.Done)


def test_calls_that_wait(kvd: LiveKvd, member: RawMember) -> None:
    limit = LIMITS["waiters"]
    member.call(msg.RegionCreate(*member.head(), "g", 1, 64, TOKENS, ROW))
    member.call(msg.Expect(*member.head(), "t-wait", "g", [0], TOKENS, 1, 60_000))
    waiting = [msg.AwaitTransfer(*member.head(), "t-wait") for _ in range(limit)]
    for frame in waiting:
        member.zmq.send(member.encode(frame))
    reply = member.raw(member.encode(msg.AwaitTransfer(*member.head(), "t-wait")))
    assert is_over(reply, limit)
    assert kvd.status()["transfers"]["waiters"] == limit
    member.zmq.send(member.encode(msg.DropTransfer(*member.head(), "t-wait")))
    replies = [member.decode(member.zmq.recv()) for _ in range(limit + 1)]
    failed = {r.request_no for r in replies if isinstance(r, msg.Error)}
    assert failed == {frame.request_no for frame in waiting}


def test_regions(kvd: LiveKvd, member: RawMember) -> None:
    limit = LIMITS["regions"]

    def create(name: str) -> msg.ServerFrame:
        frame = msg.RegionCreate(*member.head(), name, 1, 8, TOKENS, ROW)
        return member.raw(member.encode(frame))

    for number in range(limit):
        assert isinstance(create(f"g{number}"), msg.Done)
    assert is_over(create("g-more"), limit)
    assert isinstance(create("g0"), msg.Done)
    names = [region["name"] for region in kvd.status()["regions"]]
    assert names.count("region-g0") == 1
    assert member.code(msg.RegionDestroy(*member.head(), "g0")) == ""
    assert isinstance(create("g-more"), msg.Done)
