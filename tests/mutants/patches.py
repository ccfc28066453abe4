"""A mutant: a named edit of one module's source, and the suites that must fail on it.

Production code knows nothing of mutants. The edit is made in memory, when the module is imported
in a process of its own (`child.py`); what it replaces must occur exactly once in the source, so a
mutant whose code has changed is noticed at once.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Final

SUITES: Final = MappingProxyType(
    {
        "laws": ("tests/exhaustive/test_slot_space.py", "-k", "breaks_a_law"),
        "liveness": ("tests/exhaustive/test_slot_space.py", "-k", "lost_questions"),
        "scripts": ("tests/golden/test_golden.py", "-k", "test_script and not one_outcome"),
        "slot machine": ("tests/stateful/test_release_machine.py",),
        "block machine": ("tests/stateful/test_block_machine.py",),
        "blocks by example": (
            "tests/unit/core/test_block_table.py",
            "tests/unit/core/test_block_saves.py",
        ),
        "room by example": ("tests/unit/core/test_pool_room.py",),
        "arc by example": ("tests/unit/core/test_arc_policy.py",),
        "eviction": ("tests/stateful/test_evict_machine.py",),
        "machine by example": ("tests/unit/core/test_machine_seeds.py",),
        "kept steps by example": (
            "tests/unit/core/test_steps.py",
            "tests/unit/core/test_step_refusals.py",
            "tests/unit/core/test_step_ends.py",
            "tests/unit/core/test_step_refused_named.py",
        ),
        "whole tenancies by example": ("tests/unit/core/test_uses.py",),
        "adoption by example": ("tests/unit/core/test_adoption.py",),
        "checksums by example": ("tests/unit/core/test_span_sums.py",),
        "simulator": ("tests/sim/test_sim.py", "-k", "past_seed"),
        "shim under pressure": (
            "tests/unit/engine_shim/test_pipeline_pressure.py",
            "tests/unit/engine_shim/test_copy_order.py",
        ),
        "kept steps": (
            "tests/unit/engine_shim/test_kept_steps.py",
            "tests/unit/engine_shim/test_kept_steps_ends.py",
        ),
        "event stream": (
            "tests/unit/client/test_event_stream.py",
            "tests/unit/client/test_event_quiet.py",
            "tests/unit/client/test_event_network.py",
        ),
        "kept steps of a client": (
            "tests/unit/client/test_client_steps.py",
            "tests/unit/client/test_client_steps_loss.py",
            "tests/unit/client/test_tickets.py",
        ),
        "what a client tells": ("tests/unit/client/test_client_told.py",),
        "queued copies": ("tests/unit/engine_shim/test_device_cpu_copies.py",),
        "flags": ("tests/unit/engine_shim/test_flags.py",),
        "notifications": ("tests/unit/engine_shim/test_device_notify.py",),
        "slots taken early": (
            "tests/unit/engine_shim/test_gate.py",
            "tests/unit/client/test_client_early.py",
        ),
        "connector scheduler": (
            "tests/unit/engine_shim/vllm/test_scheduler_side.py",
            "tests/unit/engine_shim/vllm/test_scheduler_failures.py",
        ),
        "connector region": (
            "tests/unit/engine_shim/vllm/test_sparse_scheduler.py",
            "tests/unit/engine_shim/vllm/test_sparse_memory.py",
        ),
        "connector worker": ("tests/unit/engine_shim/vllm/test_worker_side.py",),
        "connector drafts": ("tests/unit/engine_shim/vllm/test_worker_drafts.py",),
        "connector pipeline": ("tests/unit/engine_shim/vllm/test_pipeline_blocks.py",),
        "connector machine": ("tests/stateful/test_scheduler_machine.py",),
        "hot machine": ("tests/stateful/test_hot_machine.py",),
        "hot streams": ("tests/unit/engine_shim/test_hot_stream.py",),
        "hot meter": ("tests/unit/engine_shim/test_hot_meter.py",),
        "hot books": ("tests/unit/engine_shim/test_hot_residency.py",),
        "native steps": ("tests/stateful/test_steps_machine.py",),
        "native steps by example": ("tests/unit/engine_shim/test_hot_steps.py",),
        "row copies": ("tests/kernels/test_rows_copy.py",),
        "rows far away": ("tests/kernels/test_rows_copy.py", "-k", "gib"),
        "row attention": ("tests/kernels/test_rows_attention.py",),
        "row scores": ("tests/kernels/test_rows_scores.py",),
        "native books": ("tests/unit/engine_shim/test_hot_native.py",),
        "residency operations": ("tests/kernels/test_residency_tables.py",),
        "residency victims": ("tests/kernels/test_residency_victims.py",),
        "residency search": ("tests/kernels/test_residency_top_k.py",),
        "residency machine": ("tests/stateful/test_residency_machine.py",),
    }
)
"""Fast suites by name: what pytest is told to run."""


class PatchError(Exception):
    """A mutant does not fit the code any more."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One known-bad version of a module.

    name:      what is wrong with it.
    module:    dotted name of the module.
    old, new:  text that occurs once in its source, and what stands there instead.
    caught_by: names of `SUITES`, each of which must fail.
    """

    name: str
    module: str
    old: str
    new: str
    caught_by: tuple[str, ...]

    def apply(self, source: str) -> str:
        """The bad source.

        Raises: PatchError when `old` is not there exactly once, or nothing would change.
        """
        found = source.count(self.old)
        if found != 1:
            raise PatchError(
                f"mutant {self.name!r}: its text occurs {found} times in {self.module}; "
                "bring it up to date with the code"
            )
        if self.old == self.new:
            raise PatchError(f"mutant {self.name!r} changes nothing")
        return source.replace(self.old, self.new)


def source_path(module: str) -> Path:
    """Where the source of a module is, without importing it.

    Raises: PatchError when there is no such module.
    """
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)  # of a module below it this would import the packages
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place, *parts)
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.is_file():
                return found
    raise PatchError(f"there is no module {module}")


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with a mutant's source; first in `sys.meta_path`."""

    def __init__(self, mutant: Mutant) -> None:
        self.module = mutant.module
        self.path = source_path(mutant.module)
        self.source = mutant.apply(self.path.read_text(encoding="utf-8"))
        self.was_used = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname != self.module:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(self.path))

    def exec_module(self, module: ModuleType) -> None:
        """Run the bad source as the module."""
        self.was_used = True
        module.__file__ = str(self.path)
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)
