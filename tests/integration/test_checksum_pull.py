"""A kvd that reads from another one's pool verifies what it copies, and says what it found."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from bench.wire_client import WireError
from kvd.plan.layout import BlockLayout
from kvd.wire import messages as msg
from kvd.wire.slot_items import ComputedItem, ReadItem, SaveEndedItem, SaveItem, WrittenItem
from kvd_kernels.host import crc32c
from tests.integration.live_kvd import LiveKvd, until
from tests.integration.raw_frames import LAYOUT, TOKENS, epochs
from tests.integration.raw_peers import (
    BLOCK_BYTES,
    QUICK,
    DecodeMember,
    PrefillMember,
    free_port,
)

SPANS = BlockLayout(LAYOUT)


@pytest.fixture(scope="module")
def producer() -> Iterator[LiveKvd]:
    with LiveKvd(*QUICK) as made:
        yield made


@pytest.fixture(scope="module")
def consumer() -> Iterator[LiveKvd]:
    with LiveKvd(*QUICK) as made:
        yield made


@pytest.fixture
def pair(producer: LiveKvd, consumer: LiveKvd) -> Iterator[tuple[PrefillMember, DecodeMember]]:
    with ExitStack() as stack:
        decode = stack.enter_context(DecodeMember(consumer, free_port()))
        yield stack.enter_context(PrefillMember(producer)), decode


def offer_from_pool(prefill: PrefillMember, port: int, transfer: str, rows: bytes, crc: int) -> int:
    """Save rows into a block, and offer them; their slot is gone before anybody claims them."""
    block = int(prefill.reserve(transfer, 1)[0])
    assert prefill.pool is not None
    prefill.pool.write_bytes(block * SPANS.stride + SPANS.spans(0)[0].offset, rows)
    epoch = epochs(prefill)[0]
    save = SaveItem("s", [block], [TOKENS])
    read = ReadItem(transfer, f"127.0.0.1:{port}", 0, TOKENS, [0], [block])
    assert prefill.events([WrittenItem(0, epoch, 0, [save], [read])]) == []
    ended = SaveEndedItem(0, epoch, "s", True, [], struct.pack("<I", crc))
    assert prefill.events([ComputedItem(0, epoch), ended]) == []
    until(lambda: epochs(prefill)[0] == epoch + 1, "the read is redirected to the pool")
    return block


def test_rows_with_the_right_checksum_arrive(
    producer: LiveKvd, consumer: LiveKvd, pair: tuple[PrefillMember, DecodeMember]
) -> None:
    prefill, decode = pair
    rows = os.urandom(BLOCK_BYTES)
    offer_from_pool(prefill, decode.port, "t-right", rows, crc32c(rows))
    decode.expect("t-right")
    assert decode.arrived("t-right") == rows
    assert producer.counter("checksum_mismatches") == 0
    assert consumer.counter("checksum_mismatches") == 0


def test_damaged_rows_fail_the_transfer_and_their_block_is_dropped(
    producer: LiveKvd, consumer: LiveKvd, pair: tuple[PrefillMember, DecodeMember]
) -> None:
    prefill, decode = pair
    rows = os.urandom(BLOCK_BYTES)
    block = offer_from_pool(prefill, decode.port, "t-wrong", rows, crc32c(rows) ^ 1)
    decode.expect("t-wrong")
    with pytest.raises(WireError, match="transfer_failed"):
        decode.call(msg.AwaitTransfer(*decode.head(), "t-wrong"))
    until(lambda: producer.counter("checksum_mismatches") == 1)
    assert consumer.counter("checksum_mismatches") == 1
    assert producer.status()["pool"]["blocks"]["poisoned"] == 1
    _, story = producer.get(f"/v1/story/block{block}?format=text")
    assert f"expected={crc32c(rows) ^ 1:08x} got={crc32c(rows):08x}" in story
    prefill.unpin("t-wrong")
    until(lambda: producer.status()["pool"]["blocks"]["poisoned"] == 0)
