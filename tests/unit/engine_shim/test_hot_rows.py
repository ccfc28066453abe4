"""Offsets of hot buffers, rows that were and were not written, buffers that are free or not."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine_shim.device import Device, DeviceCode, DeviceError, Event
from engine_shim.device_cpu import CpuDevice
from engine_shim.hot_lending import BufferLender, NoHotBufferError, has_ended
from engine_shim.hot_rows import HoleError, HotLayout, WrittenRows

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1, 0, 1), "num_buffers is 0"),
        ((1, 0, 1, 0, 1), "num_layers is 0"),
        ((1, 1, 0, 0, 1), "slots is 0"),
        ((1, 1, 1, -1, 1), "scratch_rows is -1"),
        ((1, 1, 1, 0, 0), "row_bytes is 0"),
    ],
)
def test_layout_that_cannot_be(sizes: tuple[int, int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HotLayout(*sizes)


@pytest.mark.parametrize(("buffer", "layer"), [(-1, 0), (3, 0), (0, -1), (0, 5)])
def test_place_outside_the_buffers(buffer: int, layer: int) -> None:
    with pytest.raises(IndexError, match=f"buffer {buffer} layer {layer} is outside"):
        HotLayout(3, 5, 4, 2, 10).layer_offset(buffer, layer)


def test_places_do_not_overlap() -> None:
    layout = HotLayout(num_buffers=3, num_layers=5, slots=7, scratch_rows=3, row_bytes=10)
    ranges = []
    for buffer in range(3):
        for layer in range(5):
            start = layout.layer_offset(buffer, layer)
            ranges.append((start, start + 7 * 10))
        start = layout.scratch_offset(buffer)
        ranges.append((start, start + 3 * 10))
    assert all(start % 64 == 0 for start, _ in ranges)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert ranges[-1][1] <= layout.num_bytes


def test_offsets_beyond_four_gigabytes() -> None:
    layout = HotLayout(num_buffers=64, num_layers=78, slots=4096, scratch_rows=8192, row_bytes=1152)
    assert layout.layer_bytes == 4096 * 1152
    assert layout.layer_offset(63, 77) == 63 * layout.buffer_bytes + 77 * 4096 * 1152
    assert layout.num_bytes > 5 * 2**32


def test_gap_is_refused_when_it_is_written() -> None:
    rows = WrittenRows("r", 2, track_rows=False)
    rows.add(0, 0, 5)
    with pytest.raises(HoleError, match="request r layer 0: position 5 is not written but 6 is"):
        rows.add(0, 6, 7)
    assert rows.end(0) == 5
    with pytest.raises(HoleError, match="position 0 is not written but 1 is"):
        rows.check_writable(1, 1)


def test_row_that_was_not_written_is_refused_when_it_is_read() -> None:
    rows = WrittenRows("r", 2, track_rows=False)
    rows.add(1, 0, 5)
    rows.require(1, [4, 0])
    with pytest.raises(HoleError, match="layer 1: position 5 is read but was never written") as it:
        rows.require(1, [4, 5])
    assert (it.value.request, it.value.layer, it.value.position) == ("r", 1, 5)
    with pytest.raises(HoleError):
        rows.require(0, [0])


def test_truncated_rows_are_not_written() -> None:
    for track in (False, True):
        rows = WrittenRows("r", 2, track_rows=track)
        for layer in range(2):
            rows.add(layer, 0, 9)
        rows.truncate(4)
        rows.require(0, range(4))
        for layer in range(2):
            with pytest.raises(HoleError):
                rows.require(layer, [4])
        rows.add(0, 4, 5)
        rows.require(0, [4])
        rows.truncate(100)
        assert rows.end(0) == 5


def test_tracked_rows_may_come_in_any_order_and_holes_show_when_read() -> None:
    rows = WrittenRows("r", 1, track_rows=True)
    rows.add(0, 6, 8)
    rows.add(0, 0, 3)
    rows.check_writable(0, 100)
    rows.require(0, [0, 1, 2, 6, 7])
    for hole in (3, 5, 8):
        with pytest.raises(HoleError, match=f"position {hole} is read"):
            rows.require(0, [hole])


def test_lender_without_free_buffers() -> None:
    lender = BufferLender(2)
    assert [lender.lend(), lender.lend()] == [0, 1]
    with pytest.raises(NoHotBufferError, match="none of the 2 hot buffers is free, 0 wait"):
        lender.lend()
    lender.give_back(0, ())
    assert lender.num_free == 1
    assert lender.lend() == 0


def fail_with(event: Event, code: DeviceCode) -> None:
    """Let an event fail."""
    event.arm()(DeviceError(code, "test"))


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        (DeviceCode.COPY_FAILED, True),
        (DeviceCode.CANCELLED, True),
        (DeviceCode.ABANDONED, False),
    ],
)
def test_failed_copies_have_ended_abandoned_ones_may_have_not(
    code: DeviceCode, ended: bool
) -> None:
    event = CpuDevice().event()
    fail_with(event, code)
    assert has_ended(event) is ended


def test_buffer_is_parked_until_its_last_copy_ends() -> None:
    device: Device = CpuDevice()
    first, second = device.event(), device.event()
    end_first, end_second = first.arm(), second.arm()
    lender = BufferLender(1)
    lender.give_back(lender.lend(), (first, second))
    for _ in range(2):
        assert (lender.num_free, lender.num_parked) == (0, 1)
        with pytest.raises(NoHotBufferError, match="1 wait for a copy to end"):
            lender.lend()
        end_first(None)
    end_second(DeviceError(DeviceCode.COPY_FAILED, "test"))
    assert (lender.num_free, lender.num_parked) == (1, 0)
    assert lender.lend() == 0
