"""Copies with checksums against the same copies without: spans in random order between memfds.

The two take turns, each on spans that were not touched lately, a repetition moving more than the
caches hold; see `bench.kernels_copy`. One row a case also shows the checksum alone, on bytes that
are in the cache: what it would cost if the copy did not hide it.
"""

from __future__ import annotations

import array
import sys
import time
from collections.abc import Sequence

from bench.kernels_copy import cycle, make_region, span_lists
from bench.report import Row, argument_parser, compare, finish, measure
from kvd_kernels.host import Mapping, copy_kernels, copy_spans, copy_sums, crc32c

_MIB = 1 << 20
_ROW_BYTES = 1152
_TARGET = 0.8
_CASES = (
    ("rows of 1152 B", _ROW_BYTES, None),
    ("4 KiB", 4096, _TARGET),
    ("18 KB, 16 rows", 16 * _ROW_BYTES, _TARGET),
    ("64 KiB", 65536, _TARGET),
    ("144 KB, 128 rows", 128 * _ROW_BYTES, _TARGET),
    ("16 MB", 16 * _MIB, _TARGET),
)


def _case_rows(
    dst: Mapping, src: Mapping, case: tuple[str, int, float | None], repetitions: int
) -> list[Row]:
    name, span_bytes, target = case
    lists = cycle(span_lists(src.size, min(144 * _MIB, src.size // 2), span_bytes))
    rows = []
    for kernel in copy_kernels():
        plain: list[float] = []
        summed: list[float] = []
        for _ in range(repetitions):
            spans = next(lists)
            begin = time.perf_counter_ns()
            moved = copy_spans(dst, src, spans, kernel=kernel)
            plain.append(moved / (time.perf_counter_ns() - begin))
            spans = next(lists)
            count = len(spans) // 3
            counts, sums = array.array("I", [1]) * count, array.array("I", [0]) * count
            begin = time.perf_counter_ns()
            moved = copy_sums(dst, src, spans, counts, sums, kernel=kernel)
            summed.append(moved / (time.perf_counter_ns() - begin))
        judged = target if kernel == copy_kernels()[0] else None
        rows.append(
            compare(f"{name}: {kernel}", "throughput", summed, plain, unit="GB/s", target=judged)
        )
    return rows


def _alone(span_bytes: int, repetitions: int) -> Row:
    data = bytes(range(256)) * (span_bytes // 256)
    rounds = max(1, 8 * _MIB // span_bytes)
    figures = []
    for _ in range(repetitions):
        begin = time.perf_counter_ns()
        for _ in range(rounds):
            crc32c(data)
        figures.append(rounds * span_bytes / (time.perf_counter_ns() - begin))
    return measure(f"{span_bytes // 1024} KiB in cache: crc32c", "throughput", figures, unit="GB/s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    parser = argument_parser("copies with checksums against copies without")
    parser.add_argument("--pool-mib", type=int, default=512, help="bytes at each end, in MiB")
    parser.add_argument("--repetitions", type=int, default=15, help="samples of each method")
    arguments = parser.parse_args(argv)
    if arguments.pool_mib < 32 or arguments.repetitions < 1:
        parser.error("--pool-mib must be at least 32 and --repetitions at least 1")
    size = arguments.pool_mib * _MIB
    dst, src = make_region(size), make_region(size)
    rows = []
    for case in _CASES:
        rows += _case_rows(dst, src, case, arguments.repetitions)
    rows += [_alone(kib * 1024, arguments.repetitions) for kib in (1, 4, 16, 64)]
    return finish("checksum: ratio to the copy without, 1 thread", rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
