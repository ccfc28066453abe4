"""Options that commands of `kvctl` share, and the values that they take."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Output(StrEnum):
    """How results are written."""

    TABLE = "table"
    JSON = "json"


class SlotStateChoice(StrEnum):
    """States of a slot."""

    FREE = "free"
    HELD = "held"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"


class BlockStateChoice(StrEnum):
    """States of a block; used: all that are not free."""

    USED = "used"
    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    POISONED = "poisoned"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Place:
    """Which kvd is meant: given before the command, or behind it."""

    socket: Path | None = None
    runtime_dir: Path | None = None


SocketOption = Annotated[
    Path | None,
    typer.Option("--socket", metavar="FILE", help="Path of the daemon's admin.sock."),
]
RuntimeDirOption = Annotated[
    Path | None,
    typer.Option(
        "--runtime-dir",
        metavar="DIR",
        help="Runtime directory of the daemon. Default: $KVD_RUNTIME_DIR, $RUNTIME_DIRECTORY, "
        "/run/kvd for root, else $XDG_RUNTIME_DIR/kvd.",
    ),
]
OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="table for people, json for programs."),
]
WatchOption = Annotated[
    float | None,
    typer.Option(
        "--watch",
        "-w",
        metavar="SECONDS",
        min=0.01,
        help="Show it again every so many seconds until interrupted. With -o json each is one "
        "document on one line.",
    ),
]
EngineOption = Annotated[str, typer.Option("--engine", help="Only of this engine.")]
BlockEngineOption = Annotated[
    str, typer.Option("--engine", help="Only blocks that this engine fills, keeps or loads.")
]
MemberOption = Annotated[str, typer.Option("--member", help="Only of members with this name.")]
SlotStateOption = Annotated[
    SlotStateChoice | None, typer.Option("--state", help="Only in this state.")
]
BlockStateOption = Annotated[
    BlockStateChoice, typer.Option("--state", help="Only in this state; used: not free.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Most items shown.")]
StoryLimitOption = Annotated[
    int, typer.Option("--limit", min=1, max=500, help="The latest so many transitions.")
]
AfterOption = Annotated[
    str, typer.Option("--after", help="Go on behind this one, as told below an earlier table.")
]
