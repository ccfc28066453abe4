"""All mutants."""

from __future__ import annotations

from typing import Final

from tests.mutants import (
    adoption_mutants,
    block_mutants,
    connector_mutants,
    copy_mutants,
    evict_mutants,
    hot_mutants,
    kept_core_mutants,
    kept_mutants,
    machine_mutants,
    residency_mutants,
    row_mutants,
    shim_mutants,
    slot_mutants,
    steps_mutants,
    sum_mutants,
    told_mutants,
)

MUTANTS: Final = (
    *slot_mutants.MUTANTS,
    *block_mutants.MUTANTS,
    *evict_mutants.MUTANTS,
    *machine_mutants.MUTANTS,
    *adoption_mutants.MUTANTS,
    *kept_core_mutants.MUTANTS,
    *kept_mutants.MUTANTS,
    *told_mutants.MUTANTS,
    *shim_mutants.MUTANTS,
    *copy_mutants.MUTANTS,
    *hot_mutants.MUTANTS,
    *residency_mutants.MUTANTS,
    *row_mutants.MUTANTS,
    *steps_mutants.MUTANTS,
    *sum_mutants.MUTANTS,
    *connector_mutants.MUTANTS,
)
