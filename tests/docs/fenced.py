"""The fenced blocks of the texts for people, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]

TEXTS: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK: Final = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND: Final = re.compile(r"^(?:make|kvd|kvctl|python|systemctl|curl|pip) ")


class Command(NamedTuple):
    """A line that a reader is told to type."""

    text: str
    line: str

    def __str__(self) -> str:
        return f"{self.text}: {self.line}"


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, body) of each fenced block."""
    yield from _BLOCK.findall(path.read_text(encoding="utf-8"))


def commands() -> list[Command]:
    """Return every command of every text, without its comment."""
    found = []
    for path in TEXTS:
        for language, body in blocks(path):
            lines = body.splitlines() if language in ("", "sh", "bash") else []
            for line in lines:
                bare = re.sub(r"\s+#.*", "", line).removeprefix("$ ").strip()
                if _COMMAND.match(bare):
                    found.append(Command(path.name, bare))
    return found
