"""`python -m tests.sim SEED [--seeds N] [--trace] [--mutant NAME] [--jobs N]`."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from tests.mutants.catalogue import MUTANTS
from tests.mutants.patches import MutantFinder

if TYPE_CHECKING:
    from tests.sim.run import Verdict


def main() -> int:
    """Run seeds; exit 1 when any broke a rule."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", type=int, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from SEED on")
    parser.add_argument("--trace", action="store_true", help="print every event and effect")
    parser.add_argument("--mutant", default="", help="plant this known bug first")
    parser.add_argument("--first", action="store_true", help="stop at the first broken rule")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    if args.mutant and not plant(args.mutant):
        parser.error("no such mutant; there are: " + "; ".join(m.name for m in MUTANTS))
    if args.seeds == 1:
        print_options(args.seed)
    seeds = range(args.seed, args.seed + args.seeds)
    began = time.perf_counter()
    verdicts = []
    if args.jobs > 1 and args.seeds > 1:
        with ProcessPoolExecutor(args.jobs) as pool:
            verdicts = list(pool.map(run_one, seeds, chunksize=8))
    else:
        for seed in seeds:
            verdicts.append(run_one(seed, trace=args.trace))
            if args.first and not verdicts[-1].ok:
                break
    report(verdicts, time.perf_counter() - began)
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def plant(name: str) -> bool:
    """Have the mutant's module imported as the mutant. Returns whether there is such a mutant."""
    mutant = next((mutant for mutant in MUTANTS if mutant.name == name), None)
    if mutant is not None:
        # The simulator is imported only later, and its worker processes are forks of this one.
        assert mutant.module not in sys.modules, f"{mutant.module} is imported already"
        sys.meta_path.insert(0, MutantFinder(mutant))
    return mutant is not None


def print_options(seed: int) -> None:
    """Print the seed and the world that it draws."""
    from tests.sim.options import draw

    print(f"seed {seed}")
    print("\n".join(draw(random.Random(seed)).lines()))


def run_one(seed: int, *, trace: bool = False) -> Verdict:
    """Run one seed."""
    from tests.sim.run import run_seed

    return run_seed(seed, print if trace else None)


def report(verdicts: list[Verdict], seconds: float) -> None:
    """Print what failed, and a summary."""
    bad = [verdict for verdict in verdicts if not verdict.ok]
    for verdict in bad[:20]:
        print(f"seed {verdict.seed} FAILS  {verdict.text}")
    marks = sum((verdict.marks for verdict in verdicts), Counter[str]())
    print("; ".join(f"{name}: {marks[name]}" for name in sorted(marks)))
    count = len(verdicts)
    events = sum(verdict.events for verdict in verdicts)
    print(
        f"{count} seeds, {len(bad)} failing {dict(Counter(v.rule for v in bad))}, "
        f"{seconds:.1f} s, {count / seconds:.1f} seeds/s, {events // count} events per seed, "
        f"{sum(v.copies for v in verdicts) // count} copies per seed, "
        f"{sum(v.transfers for v in verdicts)} transfers, "
        f"{sum(v.rows for v in verdicts)} rows checked"
    )


if __name__ == "__main__":
    sys.exit(main())
