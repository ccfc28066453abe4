"""Tables of the device beside their definition."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from kvd_kernels.residency_reference import Ints, Placed, Table

CPU = torch.device("cpu")


def ints(values: Sequence[int] | Sequence[Sequence[int]] | Ints) -> torch.Tensor:
    """Return int32s."""
    return torch.from_numpy(np.array(values, np.int32))


def stamps_of(defined: Table) -> Ints:
    """Return the steps and chances of a table's slots as the device has them."""
    return (2 * defined.stamps + defined.chances).astype(np.int32)


def upload(residency: ModuleType, tables: Any, number: int, defined: Table) -> None:
    """Make a table of the device what its definition is."""
    words = residency.kernels
    tables.cache_slots[number] = -1
    for slot, token in enumerate(defined.tokens.tolist()):
        if token >= 0:
            tables.cache_slots[number, token] = slot
    tables.tokens[number] = torch.from_numpy(defined.tokens)
    tables.stamps[number] = torch.from_numpy(stamps_of(defined))
    free = defined._free
    tables.free[number, : len(free)] = ints(free)
    state = tables.state[number]
    state[words.STEP.value], state[words.HAND.value] = defined.step, defined.hand
    state[words.NUM_FREE.value], state[words.EVICTED.value] = len(free), defined.evicted
    state[words.FRESH_START.value] = defined.fresh.start
    state[words.FRESH_END.value] = defined.fresh.stop


def assert_same_table(residency: ModuleType, tables: Any, number: int, defined: Table) -> None:
    """A table of the device is what its definition is, both ways round."""
    words = residency.kernels
    assert tables.tokens[number].tolist() == defined.tokens.tolist()
    assert tables.stamps[number].tolist() == stamps_of(defined).tolist()
    state = tables.state[number].tolist()
    assert state[words.STEP.value] == defined.step
    assert state[words.HAND.value] == defined.hand
    assert state[words.EVICTED.value] == defined.evicted
    assert tables.free[number, : state[words.NUM_FREE.value]].tolist() == defined._free
    resident = np.flatnonzero(tables.cache_slots[number].numpy() >= 0)
    assert resident.tolist() == sorted(token for token in defined.tokens.tolist() if token >= 0)
    slots = tables.cache_slots[number].numpy()[resident]
    assert defined.tokens[slots].tolist() == resident.tolist()


def placed_by(misses: Sequence[int], out: Any, line: int) -> Placed:
    """Return what `assign` wrote in a line."""
    loads, scratch = out.figures[line].tolist()
    pairs = zip(
        out.load_positions[line, :loads].tolist(),
        out.load_slots[line, :loads].tolist(),
        strict=True,
    )
    places = out.places[line, : len(misses)].numpy().copy()
    rows = out.scratch[line, :scratch].tolist()
    return Placed(np.array(misses, np.int32), places, list(pairs), rows)
