"""Copy kernels against glibc's memcpy: spans in random order between two 4 KiB-page memfds.

A repetition moves about one layer (144 MiB), more than the caches hold: in a shorter one the plain
copy would leave its dirty lines for the next method to write back. Methods take turns, each on
spans that were not touched lately. The baseline is the "scalar" kernel, which is glibc's memcpy
called once per span from native code; memcpy called through ctypes is shown beside it, because its
cost per call would flatter the kernels on short spans.
"""

from __future__ import annotations

import array
import ctypes
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from bench.report import Row, argument_parser, compare, finish
from kvd_kernels.host import Mapping, copy_kernels, copy_spans

_ROW_BYTES = 1152
_MIB = 1 << 20
_CASES = (
    ("rows of 1152 B", _ROW_BYTES, None),
    ("18 KB, 16 rows", 16 * _ROW_BYTES, 1.35),
    ("144 KB, 128 rows", 128 * _ROW_BYTES, 1.5),
    ("16 MB", 16 * _MIB, 1.5),
)


def make_region(size: int) -> Mapping:
    """A populated memfd of so many bytes, mapped."""
    fd = os.memfd_create("bench-copy")
    try:
        os.ftruncate(fd, size)
        mapping = Mapping(fd, size, writable=True)
    finally:
        os.close(fd)
    mapping.populate(0, size)
    return mapping


def span_lists(pool_bytes: int, repetition_bytes: int, span_bytes: int) -> list[array.array[int]]:
    """Cut the pool into spans, in random order at both ends, a list per repetition."""
    count = pool_bytes // span_bytes
    draw = random.Random(span_bytes)
    sources, targets = list(range(count)), list(range(count))
    draw.shuffle(sources)
    draw.shuffle(targets)
    per_list = max(1, repetition_bytes // span_bytes)
    lists = []
    for begin in range(0, count - per_list + 1, per_list):
        words = array.array("Q")
        for i in range(begin, begin + per_list):
            words.extend((targets[i] * span_bytes, sources[i] * span_bytes, span_bytes))
        lists.append(words)
    return lists


def _ctypes_memcpy(dst: Mapping, src: Mapping) -> Callable[[array.array[int]], int]:
    memmove, to, start = ctypes.memmove, dst.address, src.address

    def copy(spans: array.array[int]) -> int:
        moved = 0
        for i in range(0, len(spans), 3):
            memmove(to + spans[i], start + spans[i + 1], spans[i + 2])
            moved += spans[i + 2]
        return moved

    return copy


def _methods(dst: Mapping, src: Mapping) -> dict[str, Callable[[array.array[int]], int]]:
    def native(kernel: str) -> Callable[[array.array[int]], int]:
        return lambda spans: copy_spans(dst, src, spans, kernel=kernel)

    methods = {name: native(name) for name in copy_kernels()}
    return methods | {"ctypes memcpy": _ctypes_memcpy(dst, src)}


def cycle(lists: Sequence[array.array[int]]) -> Iterator[array.array[int]]:
    """The lists in turn, without end."""
    while True:
        yield from lists


def _case_rows(
    dst: Mapping,
    src: Mapping,
    case: tuple[str, int, float | None],
    repetition_bytes: int,
    repetitions: int,
) -> list[Row]:
    name, span_bytes, target = case
    methods = _methods(dst, src)
    samples: dict[str, list[float]] = {method: [] for method in methods}
    lists = cycle(span_lists(src.size, repetition_bytes, span_bytes))
    for _ in range(repetitions):
        for method, copy in methods.items():
            spans = next(lists)
            begin = time.perf_counter_ns()
            moved = copy(spans)
            samples[method].append(moved / (time.perf_counter_ns() - begin))
    best = copy_kernels()[0]
    return [
        compare(
            f"{name}: {method}",
            "throughput",
            figures,
            samples["scalar"],
            unit="GB/s",
            target=target if method == best else None,
        )
        for method, figures in samples.items()
        if method != "scalar"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    parser = argument_parser("copy kernels against glibc memcpy")
    parser.add_argument("--pool-mib", type=int, default=768, help="bytes at each end, in MiB")
    parser.add_argument("--repetitions", type=int, default=15, help="samples of each method")
    arguments = parser.parse_args(argv)
    pool_bytes = arguments.pool_mib * _MIB
    repetition_bytes = min(144 * _MIB, pool_bytes)
    if pool_bytes < 16 * _MIB or arguments.repetitions < 1:
        parser.error("--pool-mib must be at least 16 and --repetitions at least 1")
    dst, src = make_region(pool_bytes), make_region(pool_bytes)
    rows = []
    for case in _CASES:
        rows += _case_rows(dst, src, case, repetition_bytes, arguments.repetitions)
    return finish("kernels_copy: ratio to glibc memcpy, 1 thread", rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
