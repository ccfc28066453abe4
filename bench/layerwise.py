"""The layerwise path: layers saved and loaded through kvd, against memcpy of the same bytes.

* the copy kernel alone on long pieces
* steps of as many layers as models with such rows have, at least 4 of them in flight, and single
  calls that are waited for, through a real kvd, the client and the pipeline, every control message
  included
* how often a byte is copied, and how many bytes travel by socket
* the delay that compute sees, against max(0, transfer - compute)
* the connector's hooks in a step that moves nothing

The baselines of a step are one thread of glibc's memcpy, and two threads of the best copy kernel,
that copy the same pieces between the same slots and pool blocks, each layer shared by both. The
gate judges steps without checksums: memcpy computes none. For the record, what the same copies
reach with one round trip to a server that only answers for each layer: a pipeline that asks kvd
once for a step needs none of these, but keeps books, slots and a gate.

    python -m bench.layerwise [--json FILE] [--gate] [--rounds N]
"""

from __future__ import annotations

import os
import statistics
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from bench.copy_meter import CopyMeter
from bench.daemon import select_pause
from bench.layerwise_ceiling import Ceiling
from bench.layerwise_hooks import hook_rows
from bench.layerwise_rig import MIB, Rig, Shape, copy_rate
from bench.report import Better, Row, argument_parser, compare, finish, measure
from kvd_kernels.host import Mapping, copy_kernels

KIB: Final = 1024
KERNEL_BYTES: Final = (128 * KIB, 144 * KIB, 2 * MIB)
KERNEL_POOL: Final = 512 * MIB
COLD_BYTES: Final = 512 * MIB
KERNEL_TARGET: Final = 1.5
SAVE_TARGET: Final = 1.0
LOAD_TARGET: Final = 1.2
CALL_TARGET: Final = 0.6
BARE_TARGETS: Final = {144 * KIB: 0.7, 2 * MIB: 0.85}
LAYERS: Final = {144 * KIB: 61, 2 * MIB: 16}
"""Layers of a step: 144 KiB are 128 rows of the latent of DeepSeek-V3, which has 61 layers."""
REPEATS: Final = {144 * KIB: 20, 2 * MIB: 2}
"""Single calls for each round. The small ones take a millisecond: a few of them would measure what
the machine's other guests did in a twentieth of a second."""
SOCKET_SHARE_MAX: Final = 0.01
MEMCPY: Final = "scalar"
BARE_THREADS: Final = 2


def kernel_rows(rounds: int) -> list[Row]:
    """The best kernel against memcpy, one thread, long pieces."""
    best = copy_kernels()[0]
    dst, src = _region(), _region()
    rows = []
    for size in KERNEL_BYTES:
        count = KERNEL_POOL // size
        half = count // 2
        spans = [array("Q") for _ in range(2)]
        for at in range(count):
            # Each method walks a half of both regions that the other one has left cold.
            spans[at // half % 2].extend(((count - 1 - at) * size, at * size, size))
        samples = _interleaved(
            rounds,
            {
                best: lambda pieces=spans: copy_rate(dst, src, pieces[0], best),  # type: ignore[misc]
                MEMCPY: lambda pieces=spans: copy_rate(dst, src, pieces[1], MEMCPY),  # type: ignore[misc]
            },
        )
        rows.append(
            compare(
                f"kernel {best}, pieces of {size // KIB} KiB, {dst.smaps_page_kb()} KiB pages",
                "rate to memcpy",
                samples[best],
                samples[MEMCPY],
                unit="GB/s",
                target=KERNEL_TARGET,
            )
        )
    dst.close()
    src.close()
    return rows


def _region() -> Mapping:
    """A populated memfd."""
    fd = os.memfd_create("bench-layerwise")
    try:
        os.ftruncate(fd, KERNEL_POOL)
        mapping = Mapping(fd, KERNEL_POOL, writable=True)
    finally:
        os.close(fd)
    mapping.populate(0, KERNEL_POOL)
    return mapping


def _interleaved(rounds: int, methods: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Samples of each method, taking turns; what comes first in a round changes."""
    samples: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    for turn in range(rounds):
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            samples[name].append(methods[name]())
    return samples


def step_rows(block_bytes: int, checksums: str, rounds: int) -> list[Row]:
    """Steps of many layers in flight, against memcpy and the bare kernel."""
    best, rows = copy_kernels()[0], []
    judged = checksums == "off"
    shape = Shape(block_bytes, layers=LAYERS[block_bytes], checksums=checksums)
    with Rig(cold(shape)) as rig, Ceiling() as ceiling:
        for loads, target in ((False, SAVE_TARGET), (True, LOAD_TARGET)):
            samples = _interleaved(
                rounds,
                {
                    "ours": rig.load if loads else rig.save,
                    "memcpy": lambda to=loads: rig.bare(MEMCPY, 1, loads=to),  # type: ignore[misc]
                    "bare": lambda to=loads: rig.bare(best, BARE_THREADS, loads=to),  # type: ignore[misc]
                    **{
                        f"echo {threads}": lambda to=loads, n=threads: ceiling.run(rig, n, loads=to)  # type: ignore[misc]
                        for threads in (1, BARE_THREADS)
                    },
                },
            )
            case = _case("load" if loads else "save", block_bytes, checksums)
            for baseline, name, goal in (
                ("memcpy", "rate to memcpy", target),
                ("bare", f"rate to {BARE_THREADS} threads of {best}", BARE_TARGETS[block_bytes]),
            ):
                rows.append(
                    compare(
                        case,
                        name,
                        samples["ours"],
                        samples[baseline],
                        unit="GB/s",
                        target=goal if judged else None,
                    )
                )
            if judged:
                rows += _ceiling_rows(case, samples, best)
    return rows


def _ceiling_rows(case: str, samples: dict[str, list[float]], best: str) -> list[Row]:
    """What one bare round trip a layer leaves of the two-thread kernel, and how far we are off."""
    echoes = [samples[f"echo {threads}"] for threads in (1, BARE_THREADS)]
    ceiling = max(echoes, key=statistics.median)
    what, bare = "a bare round trip a layer, rate to", samples["bare"]
    return [
        compare(case, f"{what} {BARE_THREADS} threads of {best}", ceiling, bare, unit="GB/s"),
        compare(case, "rate to that", samples["ours"], ceiling, unit="GB/s"),
    ]


def _case(what: str, block_bytes: int, checksums: str) -> str:
    return f"{what} 64 x {block_bytes // KIB} KiB, checksums {checksums}"


def call_rows(block_bytes: int, checksums: str, rounds: int) -> list[Row]:
    """One layer saved and waited for; one loaded and waited for.

    Half of the calls follow another at once, while kvd keeps the books of that one; what a call
    takes that is begun when kvd has heard the one before is shown beside it, and not judged.
    """
    rows = []
    with Rig(cold(Shape(block_bytes, layers=1, checksums=checksums))) as rig:
        for loads in (False, True):
            run = rig.load if loads else rig.save
            case = _case("one call, " + ("load" if loads else "save"), block_bytes, checksums)
            judged = CALL_TARGET if checksums == "off" else None
            for name, ours, target in (
                ("rate to memcpy", run, judged),
                ("rate to memcpy, begun when kvd is idle", rig.alone(run), None),
            ):
                samples = _interleaved(
                    REPEATS[block_bytes] * rounds,
                    {
                        "ours": ours,
                        "memcpy": lambda to=loads: rig.bare(MEMCPY, 1, loads=to),  # type: ignore[misc]
                    },
                )
                ratio = samples["ours"], samples["memcpy"]
                rows.append(compare(case, name, *ratio, unit="GB/s", target=target))
    return rows


def cold(shape: Shape) -> Shape:
    """The same with so many sets that a block has left the caches when its turn comes again."""
    return replace(shape, sets=max(2, COLD_BYTES // shape.step_bytes))


def counted_rows(shape: Shape) -> list[Row]:
    """One copy for each direction, and nothing but descriptions on the sockets."""
    rows = []
    with Rig(shape) as rig:
        for what, run in (("save", rig.save), ("load", rig.load)):
            with CopyMeter() as meter:
                run()
            case = _case(what, shape.block_bytes, shape.checksums)
            copies = abs(meter.kernel_bytes / shape.step_bytes - 1)
            share = meter.socket_bytes / shape.step_bytes
            lower = Better.LOWER
            rows += [
                measure(case, "copies of a byte, - 1", [copies], unit="", target=0, better=lower),
                measure(
                    case,
                    "bytes on sockets / payload",
                    [share],
                    unit="",
                    target=SOCKET_SHARE_MAX,
                    better=lower,
                ),
            ]
    return rows


def exposed_rows(block_bytes: int, rounds: int) -> list[Row]:
    """Compute that takes a part of a transfer, half as much again, and twice as long."""
    rows = []
    for buffers, lookahead in ((2, 1), (4, 1), (4, 3)):
        with Rig(Shape(block_bytes, buffers=buffers, lookahead=lookahead)) as rig:
            for factor in (0.5, 1.5, 2.5):
                rows += _exposed(rig, factor, rounds)
    return rows


def _exposed(rig: Rig, factor: float, rounds: int) -> list[Row]:
    """Delay of a layer beyond the first ones, with compute of `factor` transfers."""
    shape, layers = rig.shape, rig.shape.layers
    measured, expected = [], []
    transfer_s = shape.layer_bytes / rig.load() / 1e9
    for _ in range(rounds):
        before = rig.pipeline.figures()
        window_s = factor * transfer_s
        rig.run(rig.request(rig.turn(), loads=True), lambda s=window_s: select_pause(s))  # type: ignore[misc]
        after = rig.pipeline.figures()
        moved_s = (after.load_s - before.load_s) / layers
        measured.append(1e3 * (after.exposed_s - before.exposed_s) / layers)
        # The first load has nothing to hide behind.
        expected.append(1e3 * (moved_s + (layers - 1) * max(0.0, moved_s - window_s)) / layers)
    case = f"compute {factor:g} transfers, B = {shape.buffers}, lookahead {shape.lookahead}"
    return [compare(case, "exposed delay of a layer", measured, expected, unit="ms")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each figure")
    parser.add_argument(
        "--small", action="store_true", help="pieces of 144 KiB alone, and no kernel: a quick look"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    rounds = arguments.rounds
    rows = [] if arguments.small else kernel_rows(rounds)
    for block_bytes in list(BARE_TARGETS)[: 1 if arguments.small else None]:
        for checksums in ("off", "always"):
            rows += step_rows(block_bytes, checksums, rounds)
            rows += call_rows(block_bytes, checksums, rounds)
            rows += counted_rows(Shape(block_bytes, checksums=checksums))
    rows += exposed_rows(144 * KIB, rounds)
    rows += hook_rows(rounds)
    return finish("layerwise: save and load of layers through kvd", rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
