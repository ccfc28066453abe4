"""Where the rows of a selection are, for engines whose attention is in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_shim.hot import Plan


@dataclass(frozen=True, slots=True)
class Places:
    """A plan as tensors: positions [N] int64 ascending, places [N] int64."""

    plan: Plan
    positions: Tensor
    places: Tensor

    @classmethod
    def of(cls, plan: Plan) -> Places:
        """Copy a plan."""
        positions = torch.tensor(plan.positions.tolist(), dtype=torch.int64)
        return cls(plan, positions, torch.tensor(plan.places.tolist(), dtype=torch.int64))

    def find(self, selected: Tensor) -> Tensor:
        """Places of positions of any shape; -1 becomes the first place.

        Raises: ValueError for a position that was not announced.
        """
        at = torch.searchsorted(self.positions, selected.clamp(min=0).flatten())
        at = at.clamp(max=self.positions.shape[0] - 1).view(selected.shape)
        strange = (self.positions[at] != selected) & (selected >= 0)
        if bool(strange.any()):
            raise ValueError(
                f"position {int(selected[strange][0])} is gathered but was not selected; "
                "announce it with `selected`"
            )
        return self.places[at]
