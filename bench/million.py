"""A million tokens in the reference engine.

Decode: the context's rows are in a region of kvd, written by a seeded generator; one indexer with
float8 keys selects for all layers; on the device are its keys and a hot buffer. Tokens and logits
must be those of a run that reads every selected row from the region afresh.

    python -m bench.million [--json FILE] [--gate] [--tokens N] [--new N]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from bench.million_decode import Case, Outcome, run_case
from bench.report import Better, Row, argument_parser, compare, finish, measure

TOKENS: Final = 1 << 20
SLOTS_MAX: Final = 20_000
DEVICE_SHARE_MAX: Final = 0.05


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    parser = argument_parser("a million tokens in the reference engine")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="length of the context")
    parser.add_argument("--new", type=int, default=48, help="tokens decoded at its end")
    parser.add_argument("--slots", type=int, default=16384, help="rows of the hot buffer")
    arguments = parser.parse_args(argv)
    if not 2 <= arguments.new < arguments.tokens <= TOKENS:
        parser.error(f"give 2 <= --new < --tokens <= {TOKENS}")
    case = Case(arguments.tokens, arguments.new, arguments.slots)
    rows = rows_of(case, run_case(case))
    return finish("a million tokens", rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
