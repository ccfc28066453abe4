"""One layer's copies between slot and pool, with the checksums that go along.

What is copied with a checksum and what without are two copies of one stream. A block's checksum
runs over all valid rows of its span: a save that begins within a block copies the block's earlier
rows again (the slot holds them), a load of a part of a block reads the rest of it for the checksum
alone.
"""

from __future__ import annotations

from array import array

from engine_shim.device import DeviceMemory, HostFunction, Stream
from kvd.plan.runs import CopySpans, SummedSpans
from kvd.plan.sums import ZERO_SAID, BadSpan
from kvd_kernels.host import Mapping


class CopyPlan:
    """The copies of one layer; filled by `LayerRows`, then handed to a stream once.

    plain:    what is copied without checksums.
    summed:   groups, one for each block that has one.
    expected: of a load: (block, checksum that its group must have).
    marks:    of a save: for each target block in order its group in `summed`, -1 for none.
    """

    def __init__(self, plain: CopySpans | None = None) -> None:
        """Nothing else to copy yet."""
        self.plain = CopySpans() if plain is None else plain
        self.summed = SummedSpans()
        self.expected: list[tuple[int, int]] = []
        self.marks = array("i")

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return self.plain.num_bytes + self.summed.num_bytes

    def submit(
        self,
        stream: Stream,
        dst: DeviceMemory | Mapping,
        src: DeviceMemory | Mapping,
        then: HostFunction,
    ) -> None:
        """Hand the copies to a stream; `then` is called when all have ended."""
        is_summed = len(self.summed) > 0
        if not is_summed:
            stream.copy(dst, src, self.plain, then)
            return
        if len(self.plain):
            stream.copy(dst, src, self.plain)
        stream.copy(dst, src, self.summed, then)

    def bad(self) -> list[BadSpan]:
        """Blocks of an ended load that are not what was saved."""
        return [
            BadSpan(block, crc, got)
            for (block, crc), got in zip(self.expected, self.summed.sums, strict=True)
            if (got or ZERO_SAID) != crc
        ]

    def sums(self) -> bytes:
        """What an ended save says of its target blocks; b"" when it summed none."""
        sums = self.summed.sums
        if not len(sums):
            return b""
        return array("I", [sums[at] or ZERO_SAID if at >= 0 else 0 for at in self.marks]).tobytes()
