"""A million tokens in the reference engine.

Decode: the context's rows are in a region of kvd, written by a seeded generator; one indexer with
float8 keys selects for all layers; on the device are its keys and a hot buffer. Scores, selection,
row copies and attention are native operations. Tokens and logits must be those of a run that reads
every selected row from the region afresh.

Prefill: the whole context through a few rotating layer buffers, whose rows every chunk loads from
kvd's pool again; then the same prompt out of the pool. A million tokens take most of an hour.

    python -m bench.million [--json FILE] [--gate] [--only decode|prefill] [--tokens N] [--new N]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Final

from bench.million_decode import Case, Outcome, run_case
from bench.million_prefill import run_prefill
from bench.report import Better, Row, argument_parser, compare, finish, measure

TOKENS: Final = 1 << 20
SLOTS_MAX: Final = 20_000
DEVICE_SHARE_MAX: Final = 0.05
HIT_SHARE_MIN: Final = 0.99


def rows_of(case: Case, outcome: Outcome) -> list[Row]:
    """The figures of a decode."""
    name, lower = f"decode at {case.num_tokens:,} tokens", Better.LOWER
    figures = outcome.figures
    used = figures["hot_hits"] + figures["hot_misses"] + figures["hot_scratch"]
    share = outcome.device_bytes / outcome.resident_bytes
    limit = DEVICE_SHARE_MAX if case.num_tokens == TOKENS else None  # slots do not shrink with it
    return [
        measure(name, "tokens and logits equal", [float(outcome.equal)], unit="", target=1.0),
        measure(name, "device / resident", [share], unit="", target=limit, better=lower),
        measure(name, "device", [outcome.device_bytes / (1 << 20)], unit="MiB"),
        measure(name, "resident", [outcome.resident_bytes / (1 << 20)], unit="MiB"),
        measure(name, "slots", [case.slots], unit="rows", target=SLOTS_MAX, better=lower),
        measure(name, "hit rate", [figures["hot_hits"] / used], unit=""),
        compare(name, "step", outcome.hot_seconds, outcome.fresh_seconds, unit="s"),
        measure(name, "generated rows", [outcome.fill_seconds], unit="s"),
    ]


def prefill_rows(num_tokens: int) -> list[Row]:
    """The figures of a prefill, with progress on standard error."""
    started = time.monotonic()

    def progress(done: int, total: int) -> None:
        seconds = time.monotonic() - started
        print(f"  prefill: {done:,} of {total:,} tokens, {seconds:.0f} s", file=sys.stderr)

    done = run_prefill(num_tokens, progress)
    name, lower = f"prefill of {num_tokens:,} tokens", Better.LOWER
    same = done.first.first_token == done.again.first_token
    found = done.again.hit_tokens / num_tokens
    share = done.device_bytes / done.resident_bytes
    return [
        measure(name, "same token out of the pool", [float(same)], unit="", target=1.0),
        measure(name, "tokens found the second time", [found], unit="", target=HIT_SHARE_MIN),
        measure(name, "layer buffers / resident", [share], unit="", target=1.0, better=lower),
        measure(name, "first", [done.first.seconds], unit="s"),
        measure(name, "out of the pool", [done.again.seconds], unit="s"),
        measure(name, "loaded", [done.loaded_bytes / 1e9], unit="GB"),
        measure(name, "compute waited", [done.exposed_seconds], unit="s"),
        measure(name, "loads took", [done.load_seconds], unit="s"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    parser = argument_parser("a million tokens in the reference engine")
    parser.add_argument("--only", choices=("decode", "prefill"), help="one of the two")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="length of the context")
    parser.add_argument("--new", type=int, default=48, help="tokens decoded at its end")
    parser.add_argument("--slots", type=int, default=16384, help="rows of the hot buffer")
    arguments = parser.parse_args(argv)
    if not 2 <= arguments.new < arguments.tokens <= TOKENS:
        parser.error(f"give 2 <= --new < --tokens <= {TOKENS}")
    rows: list[Row] = []
    if arguments.only != "prefill":
        case = Case(arguments.tokens, arguments.new, arguments.slots)
        rows += rows_of(case, run_case(case))
    if arguments.only != "decode":
        rows += prefill_rows(arguments.tokens)
    return finish("a million tokens", rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
