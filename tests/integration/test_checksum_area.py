"""The checksum area of a real kvd: who gets it, what is in it, and what a report of damage does."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from engine_shim.client import KvdClient, MemberIdentity
from kvd.wire import attach
from kvd.wire.codec import attach_reply_codec, attach_request_codec
from kvd.wire.slot_items import (
    AcquiredItem,
    BadSumItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    SaveEndedItem,
    SaveItem,
    WrittenItem,
)
from kvd.wire.sum_layout import Sum, SumView
from kvd_kernels.host import Mapping
from tests.integration.live_kvd import LiveKvd
from tests.integration.raw_attach import RawAttach
from tests.integration.raw_frames import LAYOUT, TOKENS, RawMember, digest, epochs

LAYERS = len(LAYOUT.layers)


@pytest.fixture(scope="module")
def kvd() -> Iterator[LiveKvd]:
    with LiveKvd() as made:
        yield made


@pytest.fixture(scope="module")
def without() -> Iterator[LiveKvd]:
    with LiveKvd("pool.checksums=off") as made:
        yield made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def member(kvd: LiveKvd, stack: ExitStack) -> RawMember:
    made = stack.enter_context(RawMember(kvd.runtime_dir, "e", num_slots=2))
    made.hello(LAYOUT)
    return made


def ask_sums(member: RawMember) -> tuple[attach.AttachReply, list[int]]:
    member.socket.send(attach_request_codec().encode(attach.MapSums()))
    data, fds, _, _ = socket.recv_fds(member.socket, 1 << 16, 4)
    return attach_reply_codec().decode(data), fds


def area_of(member: RawMember, stack: ExitStack) -> SumView:
    reply, fds = ask_sums(member)
    assert isinstance(reply, attach.Mapped)
    with pytest.raises(PermissionError):
        Mapping(fds[0], reply.num_bytes, writable=True)
    mapping = Mapping(fds[0], reply.num_bytes, writable=False)
    stack.callback(mapping.close)
    os.close(fds[0])
    return SumView(mapping)


def save(member: RawMember, request: str, sums: list[bytes]) -> int:
    """Save every layer of a block, with these checksums."""
    block = member.reserve(request, 1)[0]
    for layer, said in enumerate(sums):
        epoch = epochs(member)[0]
        item = SaveItem("s", [block], [TOKENS])
        assert member.events([WrittenItem(0, epoch, layer, [item])]) == []
        ended = SaveEndedItem(0, epoch, "s", True, [], said)
        assert member.events([ended, ComputedItem(0, epoch)]) == []
    return block


def test_it_is_for_members_that_attached(kvd: LiveKvd) -> None:
    with RawAttach(kvd.runtime_dir) as raw:
        assert raw.refusal(attach_request_codec().encode(attach.MapSums())) == "frame_malformed"


def test_there_is_none_without_checksums(without: LiveKvd, stack: ExitStack) -> None:
    reply, fds = ask_sums(member(without, stack))
    assert isinstance(reply, attach.Refused)
    assert (reply.code, fds) == ("region_unknown", [])
    assert without.status()["pool"]["checksums"] == "off"


def test_checksums_of_a_save_are_there_when_it_was_acknowledged(
    kvd: LiveKvd, stack: ExitStack
) -> None:
    one = member(kvd, stack)
    area = area_of(one, stack)
    said = [struct.pack("<I", 100 + layer) for layer in range(LAYERS)]
    said[-1] = b""
    block = save(one, "r", said)
    found = [area.get(layer, block) for layer in range(LAYERS)]
    assert found == [*(Sum(TOKENS, 100 + layer) for layer in range(LAYERS - 1)), None]


def test_checksums_of_another_length_are_refused(kvd: LiveKvd, stack: ExitStack) -> None:
    one = member(kvd, stack)
    block = one.reserve("r", 1)[0]
    epoch = epochs(one)[0]
    assert one.events([WrittenItem(0, epoch, 0, [SaveItem("s", [block], [TOKENS])])]) == []
    for sums in (b"123", b"12345678"):
        assert one.events([SaveEndedItem(0, epoch, "s", True, [], sums)]) == ["frame_malformed"]
    assert one.events([SaveEndedItem(0, epoch, "s", True, [], b"1234")]) == []


def test_a_reported_block_is_found_no_more(kvd: LiveKvd, stack: ExitStack) -> None:
    one = member(kvd, stack)
    block = save(one, "r", [b"abcd"] * LAYERS)
    assert one.commit([block], digest(5), [TOKENS]) in ([], [""])
    assert one.lookup("again", digest(5)) == [block]
    before = kvd.counter("checksum_mismatches")
    epoch = epochs(one)[1]
    loads = [LoadItem("r", [block], TOKENS)]
    assert one.events([AcquiredItem(1, epoch, 0, loads)]) == []
    bad = [BadSumItem(block, 7, 8), BadSumItem(block + 1, 7, 8)]
    assert one.events([LoadEndedItem(1, epoch, True, bad), ComputedItem(1, epoch)]) == []
    assert kvd.counter("checksum_mismatches") == before + 1
    assert one.lookup("more", digest(5)) == []
    _, story = kvd.get(f"/v1/story/block{block}?format=text")
    assert "expected=00000007 got=00000008" in story


def test_the_client_maps_it_once_in_a_life_of_kvd(
    kvd: LiveKvd, without: LiveKvd, stack: ExitStack
) -> None:
    identity = MemberIdentity("c", "rank0", is_scheduler=True, rank=0, layout=LAYOUT)
    client = stack.enter_context(KvdClient(identity, str(kvd.runtime_dir)))
    assert client.checksums == "always"
    view = client.span_sums()
    assert view is not None
    assert view.shape.num_spans == LAYERS
    assert client.span_sums() is view
    other = stack.enter_context(KvdClient(identity, str(without.runtime_dir)))
    assert (other.checksums, other.span_sums()) == ("off", None)
    closed = KvdClient(identity, str(without.runtime_dir))
    assert closed.span_sums() is None
    closed.close()
