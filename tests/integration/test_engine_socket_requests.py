"""Well-formed requests that cannot be, at a real kvd: one code each, and nothing has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from kvd.wire import messages as msg
from kvd.wire.layout import BlockLayoutSpec
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    ReadItem,
    SaveEndedItem,
    SaveItem,
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
    Talker,
    attaching,
    digest,
    epochs,
    refusal,
    requests,
)

BLOCKS = (4 << 20) // 128


@pytest.fixture(scope="module")
def kvd() -> Iterator[LiveKvd]:
    with LiveKvd("regions.size_max=1MiB") as made:
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


# Who speaks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [b"", b"\0" * 16, b"x", os.urandom(16)], ids=len)
def test_an_unknown_token_is_refused(kvd: LiveKvd, member: RawMember, token: bytes) -> None:
    before = kvd.refused("frames.unauthorized")
    frame = msg.Reserve(41, token, 1000, "r", 1)
    with Talker(kvd.runtime_dir) as stranger:
        error = stranger.refusal(member.encode(frame))
    assert (error.code, error.request_no) == ("unauthorized", 41)
    assert kvd.refused("frames.unauthorized") == before + 1


def test_before_the_hello_nothing_else_is_done(attach: Attach) -> None:
    client = attach()
    for frame in requests(client)[1:]:
        assert client.code(frame) == "engine_unknown"
    client.hello(LAYOUT)


def test_after_the_goodbye_the_token_is_void(kvd: LiveKvd, attach: Attach) -> None:
    client = attach()
    client.hello(LAYOUT)
    assert client.code(msg.Goodbye(*client.head())) == ""
    assert client.code(msg.Reserve(*client.head(), "r", 1)) == "unauthorized"
    assert client.code(msg.Goodbye(*client.head())) == "unauthorized"


def test_the_token_of_another_member_does_not_speak_for_this_one(attach: Attach) -> None:
    mine, theirs = attach("e", "w0", num_slots=3), attach("e", "w1", num_slots=3)
    mine.hello(LAYOUT)
    theirs.hello(LAYOUT, is_scheduler=False)
    head = (5, theirs.attached.token, 1000)
    items: list[SlotItem] = [AcquiredItem(0, 0), ComputedItem(0, 0)]
    stolen = msg.Events(*head, mine.attached.boot_id, mine.incarnation, 0, items)
    assert mine.code(stolen) == "stale_incarnation"
    assert epochs(mine) == epochs(theirs) == [0, 0, 0]
    assert mine.code(msg.Reserve(*head, "r", 1)) == "not_scheduler"
    assert theirs.events(items) == []
    assert epochs(theirs) == [1, 0, 0]


@pytest.mark.parametrize("what", ["lookup", "reserve", "commit", "unpin", "abort", "renew"])
def test_only_the_scheduler_decides_about_requests(attach: Attach, what: str) -> None:
    client = attach()
    client.hello(LAYOUT, is_scheduler=False)
    (frame,) = (f for f in requests(client) if type(f).__name__.lower() == what)
    assert client.code(frame) == "not_scheduler"


# Which life ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("boot_id", "life", "code"),
    [(b"\0" * 16, 0, "stale_boot"), (None, 1, "stale_incarnation"), (b"\1" * 16, 1, "stale_boot")],
)
def test_what_belongs_to_another_life_changes_nothing(
    kvd: LiveKvd, member: RawMember, boot_id: bytes | None, life: int, code: str
) -> None:
    boot = boot_id or member.attached.boot_id
    before = kvd.refused(f"frames.{code}")
    events = msg.Events(
        *member.head(), boot, member.incarnation + life, 0, [AcquiredItem(0, 0), ComputedItem(0, 0)]
    )
    answer = msg.Answer(
        *member.head(), boot, member.incarnation + life, 0, 0, "compute", "engine", "ended_ok"
    )
    assert [member.code(events), member.code(answer)] == [code, code]
    assert epochs(member) == [0, 0, 0]
    assert kvd.refused(f"frames.{code}") == before + 2


@pytest.mark.parametrize(
    ("epoch", "why"),
    [(0, "stale_epoch"), (2, "future_epoch"), ((1 << 64) - 1, "future_epoch")],
)
@pytest.mark.parametrize(
    "make",
    [
        AcquiredItem,
        ComputedItem,
        lambda slot, epoch: WrittenItem(slot, epoch, 0),
        lambda slot, epoch: SaveEndedItem(slot, epoch, "s", True),
    ],
    ids=["acquired", "computed", "written", "save_ended"],
)
def test_another_epoch_is_ignored_and_counted(
    kvd: LiveKvd, member: RawMember, epoch: int, why: str, make: Callable[[int, int], SlotItem]
) -> None:
    assert member.events([AcquiredItem(1, 0), ComputedItem(1, 0)]) == []
    before = kvd.status()["ignored"].get(why, 0)
    assert member.events([make(1, epoch)]) == [why]
    assert epochs(member) == [0, 1, 0]
    assert kvd.status()["ignored"][why] == before + 1
    assert kvd.status()["slots"]["held"] == 0


def test_events_are_done_once_and_in_order(kvd: LiveKvd, member: RawMember) -> None:
    items: list[SlotItem] = [AcquiredItem(0, 0), ComputedItem(0, 0), AcquiredItem(9, 0)]
    first = member.events_frame(items)
    answers = [member.raw(member.encode(first)) for _ in range(3)]
    assert [(a.next_no, a.codes) for a in answers if isinstance(a, msg.Seen)] == [
        (3, ["", "", "slot_unknown"])
    ] * 3
    assert epochs(member) == [1, 0, 0]
    member.next_no = 3
    for gap in (1, 5, 1 << 40):
        assert member.code(member.events_frame(items, 3 + gap)) == "out_of_order"
    error = refusal(lambda: member.call(member.events_frame(items, 4)))
    assert error.context == {"got": "4", "want": "3"}
    # Half of it is old: only the rest is done.
    more: list[SlotItem] = [AcquiredItem(9, 0), AcquiredItem(0, 1), ComputedItem(0, 1)]
    reply = member.call(member.events_frame(more, 2))
    assert isinstance(reply, msg.Seen)
    assert (reply.next_no, reply.codes) == (5, ["slot_unknown", "", ""])
    assert epochs(member) == [2, 0, 0]


# Slots --------------------------------------------------------------------------------------------

READ = ReadItem("t", "127.0.0.1:9", 0, TOKENS, [0])


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (AcquiredItem(3, 0), "slot_unknown"),
        (AcquiredItem(1 << 63, 0), "slot_unknown"),
        (ComputedItem(3, 0), "slot_unknown"),
        (WrittenItem(0, 0, 2, [SaveItem("s", [0], [TOKENS])]), "layer_unmapped"),
        (WrittenItem(0, 0, 1 << 62, [SaveItem("s", [0], [TOKENS])]), "layer_unmapped"),
        (WrittenItem(0, 0, 0, [SaveItem("s", [7], [TOKENS])]), "block_not_reserved"),
        (WrittenItem(0, 0, 0, [SaveItem("s", [1 << 60], [TOKENS])]), "block_not_reserved"),
        (WrittenItem(0, 0, 0, [SaveItem("s", [0], [TOKENS], ["q"])]), "block_not_reserved"),
        (WrittenItem(0, 0, 0, [SaveItem("s", [0], [TOKENS + 1])]), "limit_reached"),
        (WrittenItem(0, 0, 0, [SaveItem("s", [0], [0])]), "limit_reached"),
        (WrittenItem(0, 0, 0, [SaveItem("s", [0], [])]), "frame_malformed"),
        (WrittenItem(0, 0, 0, [SaveItem("s", [0, 0], [1, 1])]), "frame_malformed"),
        (WrittenItem(0, 0, 0, [SaveItem(s, [0], [1]) for s in "st"]), "frame_malformed"),
        (WrittenItem(0, 0, 0, [], [READ, READ]), "frame_malformed"),
        (WrittenItem(0, 0, 0, [], [ReadItem("t", "a:1", 4, 4, [0])]), "frame_malformed"),
        (WrittenItem(0, 0, 0, [], [ReadItem("t", "a:1", 0, 4, [0], [7])]), "block_not_reserved"),
        (WrittenItem(0, 0, 0, [], [ReadItem("t", "a:1", 0, 8, [0], [0])]), "frame_malformed"),
        (AcquiredItem(0, 0, 0, [LoadItem("r", [0], TOKENS)]), "span_unwritten"),
        (AcquiredItem(0, 0, 0, [LoadItem("r", [0], TOKENS + 1)]), "frame_malformed"),
        (AcquiredItem(0, 0, 0, [LoadItem("r", [0], 0)]), "frame_malformed"),
        (AcquiredItem(0, 0, 0, [LoadItem("q", [0], TOKENS)]), "block_not_reserved"),
        (AcquiredItem(0, 0, 0, [LoadItem("r", [9], TOKENS)]), "block_not_reserved"),
        (AcquiredItem(0, 0, 2, [LoadItem("r", [0], TOKENS)]), "layer_unmapped"),
        (AcquiredItem(0, 0, -7, [LoadItem("r", [0], TOKENS)]), "layer_unmapped"),
        (SaveEndedItem(0, 0, "s", True), "no_such_hold"),
        (LoadEndedItem(0, 0, True), ""),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_slot_events_that_cannot_be(
    kvd: LiveKvd, member: RawMember, item: SlotItem, code: str
) -> None:
    assert member.reserve("r", 1) == [0]
    got = member.events([item])
    assert (got or [""]) == [code]
    assert epochs(member) == [0, 0, 0]
    status = kvd.status()
    assert (status["slots"]["held"], status["transfers"]["reads_open"]) == (0, 0)
    assert status["pool"]["blocks"]["filling"] == 1
    member.unpin("r")
    assert kvd.status()["pool"]["blocks"]["free"] == BLOCKS


def test_a_member_that_does_not_contribute_saves_nothing(attach: Attach) -> None:
    client = attach(num_slots=3)
    client.hello(LAYOUT, contributes=False)
    (block,) = client.reserve("r", 1)
    assert client.events([WrittenItem(0, 0, 0, [SaveItem("s", [block], [1])])]) == [
        "not_contributor"
    ]


def test_a_shard_that_blocks_do_not_have(attach: Attach) -> None:
    """Said with a layout it is refused at once, without one when it would matter."""
    first = attach("e", "w0")
    first.hello(LAYOUT)
    (block,) = first.reserve("r", 1)
    other = attach("e", "w1", num_slots=3)

    def hello(layout: BlockLayoutSpec | None) -> msg.Hello:
        return msg.Hello(
            *other.head(), 1, 1, False, 0, 1, 0, 5, True, b"", layout, None  # shard 5
        )  # fmt: skip

    assert other.code(hello(LAYOUT)) == "frame_malformed"
    assert other.code(hello(None)) == ""
    items: list[SlotItem] = [
        WrittenItem(0, 0, 0, [SaveItem("s", [block], [TOKENS])]),
        AcquiredItem(1, 0, 1, [LoadItem("r", [block], TOKENS)]),
        WrittenItem(2, 0, 0, [], [ReadItem("t", "a:1", 0, 4, [0], [block])]),
    ]
    assert other.events(items) == ["frame_malformed"] * 3


# Requests and blocks ------------------------------------------------------------------------------


def test_blocks_that_are_not_the_engines_own(attach: Attach) -> None:
    mine, theirs = attach("e0", num_slots=3), attach("e1", num_slots=3)
    mine.hello(LAYOUT)
    theirs.hello(LAYOUT)
    (block,) = theirs.reserve("r", 1)
    assert (
        mine.commit([block, BLOCKS, 1 << 62], digest(1) * 3, [TOKENS] * 3)
        == ["block_not_reserved"] * 3
    )
    assert mine.events([WrittenItem(0, 0, 0, [SaveItem("s", [block], [1])])]) == [
        "block_not_reserved"
    ]
    assert mine.code(msg.Poison(*mine.head(), [block, BLOCKS, 1 << 62])) == ""
    assert theirs.commit([block], digest(1), [TOKENS]) == []
    assert mine.code(msg.Commit(*mine.head(), [block], digest(1) + b"x", [1])) == "frame_malformed"
    assert mine.code(msg.Commit(*mine.head(), [block], digest(1), [1, 2])) == "frame_malformed"
    assert mine.commit([block], digest(1), [TOKENS + 1]) == ["frame_malformed"]


def test_reserving_more_than_there_is(kvd: LiveKvd, member: RawMember) -> None:
    assert member.code(msg.Reserve(*member.head(), "r", BLOCKS + 1)) == "reserve_too_large"
    assert member.code(msg.Reserve(*member.head(), "r", 1 << 63)) == "limit_reached"
    assert len(member.reserve("r", BLOCKS)) == BLOCKS
    error = refusal(lambda: member.reserve("q", 1))
    assert (error.code, error.context["free"]) == ("pool_full", "0")
    member.unpin("r")
    assert len(member.reserve("q", 1)) == 1
    assert kvd.status()["pool"]["pinned_blocks"] == 1


def test_requests_that_nobody_knows(member: RawMember) -> None:
    assert member.code(msg.Renew(*member.head(), "r")) == "request_unknown"
    assert member.code(msg.Unpin(*member.head(), "r")) == ""
    assert member.code(msg.Abort(*member.head(), "r")) == ""
    assert member.code(msg.Lookup(*member.head(), "r", digest(1)[:-1])) == "frame_malformed"
    assert member.code(msg.AwaitTransfer(*member.head(), "t")) == "transfer_unknown"


def test_an_engine_without_a_layout_has_no_blocks(attach: Attach) -> None:
    """Also while the pool has the layout of another engine."""
    decode, prefill = attach("d", num_slots=3), attach("p")
    decode.hello(None)
    assert refusal(lambda: decode.reserve("r", 1)).code == "reserve_too_large"
    prefill.hello(LAYOUT)
    assert refusal(lambda: decode.reserve("r", 1)).code == "reserve_too_large"
    assert decode.lookup("r", digest(1)) == []
    assert decode.commit([0], digest(1), [TOKENS]) == ["block_not_reserved"]


# Regions and transfers ----------------------------------------------------------------------------


def test_regions_that_cannot_be(attach: Attach) -> None:
    mine, theirs = attach("e0"), attach("e1")
    mine.hello(None)
    theirs.hello(None)

    def create(client: RawMember, name: str, *spec: int) -> str:
        return client.code(msg.RegionCreate(*client.head(), name, *spec))

    assert create(mine, "g", 1, 8, TOKENS, ROW) == ""
    assert create(mine, "g", 1, 8, TOKENS, ROW) == ""
    assert create(mine, "g", 1, 9, TOKENS, ROW) == "region_exists"
    assert create(theirs, "g", 1, 8, TOKENS, ROW) == "region_exists"
    assert create(theirs, "h", 2, 1 << 14, TOKENS, ROW) == "memory_short"
    assert create(theirs, "h", 1 << 62, 1 << 62, 1 << 62, 1 << 62) == "memory_short"
    for client, name in ((theirs, "g"), (mine, "h")):
        assert client.code(msg.RegionDestroy(*client.head(), name)) == "region_unknown"
        assert client.code(msg.Allocated(*client.head(), name, [(0, 1)])) == "region_unknown"
        frame = msg.Expect(*client.head(), "t", name, [0], TOKENS, 1, 1000)
        assert client.code(frame) == "region_unknown"
    reply = mine.call(msg.Allocated(*mine.head(), "g", [(0, 2), (0, 2), (8, 1), (1 << 62, 1)]))
    assert reply == msg.Statuses(
        reply.request_no, reply.boot_id, ["", "stale_generation", "block_outside", "block_outside"]
    )


def test_regions_whose_files_have_one_name(kvd: LiveKvd, attach: Attach) -> None:
    """A memfd's name has fewer characters than a region's."""
    client = attach()
    client.hello(None)
    for name, blocks in (("a.b", 1), ("a:b", 4096), ("a@b", 1)):
        client.call(msg.RegionCreate(*client.head(), name, 1, blocks, TOKENS, ROW))
    assert client.code(msg.RegionDestroy(*client.head(), "a.b")) == ""
    regions = [r for r in kvd.status()["regions"] if r["name"] == "region-a-b"]
    assert sorted(region["asked_bytes"] for region in regions) == [64, 4096 * 64]
    assert sorted(region["populated_bytes"] for region in regions) == [4096, 4096 * 64]


@pytest.mark.parametrize(
    ("blocks", "tokens", "layers"),
    [([0], TOKENS + 1, 1), ([8], TOKENS, 1), ([0], TOKENS, 2), ([0], 1 << 62, 1), ([], 1, 1)],
)
def test_transfers_that_do_not_fit_their_region(
    kvd: LiveKvd, attach: Attach, blocks: list[int], tokens: int, layers: int
) -> None:
    client = attach()
    client.hello(None)
    client.call(msg.RegionCreate(*client.head(), "g", 1, 8, TOKENS, ROW))
    frame = msg.Expect(*client.head(), "t-bad", "g", blocks, tokens, layers, 1000)
    assert client.code(frame) == "frame_malformed"
    assert kvd.status()["transfers"]["incoming_open"] == 0


def test_waiting_for_a_transfer_ends_with_the_calls_deadline(attach: Attach) -> None:
    client = attach()
    client.hello(None)
    client.call(msg.RegionCreate(*client.head(), "g", 1, 8, TOKENS, ROW))
    client.call(msg.Expect(*client.head(), "t-late", "g", [0], TOKENS, 1, 60_000))
    for deadline in (0, 1, 60):
        number, token, _ = client.head()
        frame = msg.AwaitTransfer(number, token, deadline, "t-late")
        assert client.code(frame) == "deadline_exceeded"
    number, token, _ = client.head()
    client.zmq.send(client.encode(msg.AwaitTransfer(number, token, 60_000, "t-late")))
    assert client.code(msg.Lookup(*client.head(), "r", b"")) == ""
    client.zmq.send(client.encode(msg.DropTransfer(*client.head(), "t-late")))
    replies = {r.request_no: r for r in (client.decode(client.zmq.recv()) for _ in range(2))}
    failed = replies[number]
    assert isinstance(failed, msg.Error)
    assert failed.code == "transfer_failed"
