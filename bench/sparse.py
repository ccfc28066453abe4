"""Sparse decode: selection, residency, and the rows that they move.

* residency of a step: merge, look-up and placement, against a scan of a list by recency
* lim: scores to winners, against one pass over the scores and against torch
* misses beside those of exact LRU, on drawn traces and on those of the reference engine's decode

    python -m bench.sparse [--json FILE] [--gate] [--only PART] [--trace FILE]

Ratios are judged, times are reported beside what is aimed at: they depend on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from bench import sparse_misses, sparse_residency, sparse_rows
from bench.report import Row, argument_parser, finish

PARTS: Final = MappingProxyType(
    {"residency": sparse_residency, "misses": sparse_misses, "rows": sparse_rows}
)
"""Modules with `add_options(parser)` and `cases(arguments) -> list[Row]`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    parser = argument_parser("sparse decode: selection, residency, rows")
    parser.add_argument("--only", choices=sorted(PARTS), help="one part instead of all")
    for part in PARTS.values():
        part.add_options(parser)
    arguments = parser.parse_args(argv)
    rows: list[Row] = []
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            rows += part.cases(arguments)
    return finish("sparse", rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
