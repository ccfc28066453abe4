"""How `kvctl` tells of wrong usage."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """The commands; their mistakes are told in our words, without those of a library."""

    def invoke(self, ctx: Any) -> Any:
        """See `TyperGroup`."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise
