"""Slot events for whose answer nobody waits, at a real kvd: when it comes, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from kvd.wire import messages as msg
from kvd.wire.slot_items import AcquiredItem, ComputedItem, SlotItem
from tests.integration.live_kvd import LiveKvd
from tests.integration.raw_frames import LAYOUT, Attach, RawMember, attaching, epochs

MOST_S = 1.0
"""Far beyond what an answer may take, and far below what would be waited for without one."""


@pytest.fixture(scope="module")
def kvd() -> Iterator[LiveKvd]:
    with LiveKvd() as made:
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


def send(member: RawMember, items: Sequence[SlotItem], *, quiet: bool = True) -> msg.Events:
    """Send slot events; does not wait for the answer."""
    frame = msgspec.structs.replace(member.events_frame(items), quiet=quiet)
    member.next_no += len(items)
    member.zmq.send(member.encode(frame))
    return frame


def hear(member: RawMember) -> msg.ServerFrame:
    assert member.zmq.poll(int(1000 * MOST_S)), "no answer"
    return member.decode(member.zmq.recv())


def uses(member: RawMember, slot: int) -> list[SlotItem]:
    """A use of a slot for nothing."""
    epoch = epochs(member, 3)[slot]
    return [AcquiredItem(slot, epoch, 0), ComputedItem(slot, epoch)]


def test_the_answer_comes_by_itself(member: RawMember) -> None:
    frame = send(member, uses(member, 0))
    seen = hear(member)
    assert seen == msg.Seen(
        frame.request_no, member.attached.boot_id, frame.first_no + 2, [], frame.first_no
    )
    assert not member.zmq.poll(20), "once"


def test_the_answer_to_the_next_frame_takes_it_along(member: RawMember) -> None:
    first, second = [uses(member, slot) for slot in (0, 1)]
    quiet = send(member, first)
    send(member, second)
    last = send(member, [AcquiredItem(2, epochs(member, 3)[2], 0)], quiet=False)
    seen = hear(member)
    if seen.request_no != last.request_no:  # kvd was kept for so long that it did not wait
        assert isinstance(seen, msg.Seen)
        assert seen.since == quiet.first_no
        return
    assert seen == msg.Seen(
        last.request_no, member.attached.boot_id, quiet.first_no + 5, [], quiet.first_no
    )
    assert not member.zmq.poll(20), "nothing else"


def test_what_is_refused_is_said_at_once(member: RawMember) -> None:
    quiet = send(member, uses(member, 0))
    wrong = send(member, [ComputedItem(1, 1 << 40), AcquiredItem(1, epochs(member, 3)[1], 0)])
    seen = hear(member)
    assert isinstance(seen, msg.Seen)
    if seen.request_no == quiet.request_no:
        seen = hear(member)
        assert isinstance(seen, msg.Seen)
    assert seen.request_no == wrong.request_no
    assert seen.codes == ["future_epoch", ""]
    assert seen.since in (-1, quiet.first_no)
    assert not member.zmq.poll(20), "nothing else"


def test_a_frame_that_is_refused_as_a_whole_is_answered_at_once(member: RawMember) -> None:
    frame = msgspec.structs.replace(member.events_frame([], member.next_no + 7), quiet=True)
    member.zmq.send(member.encode(frame))
    reply = hear(member)
    assert isinstance(reply, msg.Error)
    assert (reply.request_no, reply.code) == (frame.request_no, "out_of_order")


def test_what_is_not_quiet_names_nothing_before_it(member: RawMember) -> None:
    for slot in range(2):
        frame = send(member, uses(member, slot), quiet=False)
        seen = hear(member)
        assert isinstance(seen, msg.Seen)
        assert (seen.request_no, seen.since) == (frame.request_no, -1)


def test_who_leaves_is_answered_nothing(kvd: LiveKvd, attach: Attach) -> None:
    """Its answer is dropped with its session, and kvd goes on."""
    client = attach(num_slots=3)
    client.hello(LAYOUT)
    send(client, uses(client, 0))
    client.leave()
    other = attach(num_slots=3)
    other.hello(LAYOUT)
    frame = send(other, uses(other, 0))
    seen = hear(other)
    assert isinstance(seen, msg.Seen)
    assert seen.request_no == frame.request_no
