"""How readily the kernel ends this process when memory runs out (/proc/self/oom_score_adj)."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from kvd.core.errors import LocalError

AUTO_SCORE: Final = -900
"""Last to be ended, yet not exempt: a control group in which nobody may be ended would hang."""

FILE: Final = Path("/proc/self/oom_score_adj")


def set_oom_score(asked: int | Literal["auto"] | None, file: Path = FILE) -> int:
    """Apply server.oom_score_adj; returns what holds now (0 where the kernel tells nothing).

    Args:
        asked: "auto" lowers it where that is allowed, unless something has lowered it before;
            None leaves it alone.
        file: another one only in tests.

    Raises: LocalError(oom_score_refused): a number that the kernel does not take.
    """
    now = _read(file)
    wanted = asked
    if asked == "auto":
        wanted = now if now < 0 else AUTO_SCORE
    if wanted is None or wanted == now:
        return now
    try:
        file.write_text(f"{wanted}\n", encoding="ascii")
    except OSError as error:
        if asked == "auto":
            return now
        detail = error.strerror or "unknown"
        raise LocalError("oom_score_refused", asked=asked, detail=detail, now=now) from error
    return _read(file)


def _read(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
