"""All mutants. Those of `kvd.core.machine` and of the shim get files of their own beside these.

They need a suite that runs whole machines: name it in `patches.SUITES` (`tests.sim` with a few
fixed seeds) and add their `MUTANTS` here. The mutant "the free word of the last tenancy is taken"
belongs to the acquire rule of the shim.
"""

from __future__ import annotations

from typing import Final

from tests.mutants import block_mutants, slot_mutants

MUTANTS: Final = (*slot_mutants.MUTANTS, *block_mutants.MUTANTS)
