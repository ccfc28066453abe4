"""Runs suites on one mutant, in a process of its own: `python -m tests.mutants.child NAME SUITE..`.

Prints one line of JSON, {suite: exit status of pytest}, last. NAME '' runs the code as it is.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.patches import SUITES, MutantFinder

FIXED = ("-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:asyncio")


def main(name: str, suites: list[str]) -> dict[str, int]:
    """Run suites, on the mutant of that name.

    Returns: for each suite what pytest returned; 1 means that tests failed.
    """
    finder: MutantFinder | None = None
    if name:
        mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
        assert mutant.module not in sys.modules, f"{mutant.module} is imported already"
        finder = MutantFinder(mutant)
        sys.meta_path.insert(0, finder)
    statuses = {suite: int(pytest.main([*FIXED, *SUITES[suite]])) for suite in suites}
    assert finder is None or finder.was_used, f"no suite imported {finder.module}"
    return statuses


if __name__ == "__main__":
    outcome = main(sys.argv[1], sys.argv[2:])
    print(json.dumps(outcome))
