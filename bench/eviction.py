"""Eviction policies on traces: hit rate by blocks, beside the best possible, and cost.

* share of the blocks asked for that is found: the policy against LRU, on every trace of
  `bench.eviction_traces` and in pools of three sizes; what is gained of the way from LRU to
  Belady's optimum
* LRU that lets go of a request's first block first: what the order within a request is worth
* the policy with a pool that keeps 2 % free (the default water marks): what that costs
* microseconds of a policy for each block that a trace asks for, policy against LRU, interleaved

    python -m bench.eviction [--json FILE] [--gate] [--requests N] [--policy NAME]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from bench.eviction_replay import ReplayPool, best_possible
from bench.eviction_traces import Request, traces
from bench.report import Better, Row, argument_parser, compare, finish, measure
from kvd.core.evictions import POLICIES, make_policy

POOLS: Final = (1000, 2000, 6000)
SCANNED: Final = ("prompts+scan", "mix")
"""Traces on which a scan displaces what is shared: here a policy must win."""

SCAN_GAIN: Final = 1.2
LOSS_MAX: Final = 0.01
COST_MAX: Final = 3.0
"""Times the cost of LRU, which is two writes to its list."""

FREE: Final = 0.02
COST_POOL: Final = 2000
REPEATS: Final = 5
PERCENT: Final = 100.0


def rates(policy: str, name: str, trace: Sequence[Request]) -> list[Row]:
    """Hit rates on one trace."""
    rows: list[Row] = []
    for total in POOLS:
        case = f"{name}, {total} blocks"
        lru = PERCENT * ReplayPool(total, make_policy("lru", total)).replay(trace)
        found = PERCENT * ReplayPool(total, make_policy(policy, total)).replay(trace)
        best = PERCENT * best_possible(total, trace)
        gain = SCAN_GAIN if name in SCANNED else None
        rows.append(compare(case, f"{policy} / lru", [found], [lru], unit="%", target=gain))
        rows.append(
            measure(case, f"{policy} - lru", [found - lru], unit="pt", target=-PERCENT * LOSS_MAX)
        )
        rows.append(compare(case, f"{policy} / best possible", [found], [best], unit="%"))
    return rows


def order(trace: Sequence[Request]) -> list[Row]:
    """What it is worth to let go of the tail of a request before its head."""
    rows = []
    for total in POOLS:
        head = ReplayPool(total, make_policy("lru", total), tail_first=False).replay(trace)
        tail = ReplayPool(total, make_policy("lru", total)).replay(trace)
        rows.append(
            compare(
                f"mix, {total} blocks",
                "lru, tail / head first",
                [PERCENT * tail],
                [PERCENT * head],
                unit="%",
                target=1.0,
            )
        )
    return rows


def marks(policy: str, trace: Sequence[Request]) -> list[Row]:
    """What the blocks above low water would have found."""
    rows = []
    for total in POOLS:
        kept = total - int(FREE * total)
        less = ReplayPool(kept, make_policy(policy, kept)).replay(trace)
        full = ReplayPool(total, make_policy(policy, total)).replay(trace)
        rows.append(
            measure(
                f"mix, {total} blocks",
                f"{policy} with {FREE:.0%} kept free",
                [PERCENT * (less - full)],
                unit="pt",
                target=-PERCENT * LOSS_MAX,
            )
        )
    return rows


def costs(policy: str, trace: Sequence[Request]) -> list[Row]:
    """What a block asked for costs, with its share of the replay, which is the same for both."""
    spent: dict[str, list[float]] = {policy: [], "lru": []}
    for _ in range(REPEATS):
        for name, samples in spent.items():
            pool = ReplayPool(COST_POOL, make_policy(name, COST_POOL))
            started = time.perf_counter()
            pool.replay(trace)
            samples.append(1e6 * (time.perf_counter() - started) / pool.asked)
    return [
        compare(
            f"mix, {COST_POOL} blocks",
            f"{policy} / lru, cost of a block",
            spent[policy],
            spent["lru"],
            unit="us",
            target=COST_MAX,
            better=Better.LOWER,
        )
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench."""
    parser = argument_parser("hit rates of eviction policies")
    parser.add_argument("--requests", type=int, default=3000, help="of each trace")
    parser.add_argument("--policy", default="arc", choices=sorted(POLICIES))
    arguments = parser.parse_args(argv)
    made = traces(arguments.requests)
    rows: list[Row] = []
    for name, trace in made.items():
        rows += rates(arguments.policy, name, trace)
    rows += order(made["mix"])
    rows += marks(arguments.policy, made["mix"])
    rows += costs(arguments.policy, made["mix"])
    return finish("eviction", rows, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
