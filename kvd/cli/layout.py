"""How tables of `kvctl` look. Names are never cut, since people copy them: narrow columns fold."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvd.cli.text import printable

_STYLES: Final[Mapping[str, str]] = {
    "ready": "green",
    "quarantined": "bold red",
    "poisoned": "red",
    "suspect": "yellow",
    "silent": "yellow",
    "leaving": "yellow",
    "failed": "bold red",
}


class _Printable:
    """Something whose texts, which engines may have given, cannot move a terminal's cursor."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            yield Segment(printable(segment.text), segment.style)


def to_text(content: RenderableType, width: int, color: bool = False) -> str:
    """Lay out something for so many columns; lines end without blanks."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    console.print(_Printable(content))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table with these columns; those named in `right` hold numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        justify = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return made


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """A name and a text in each line; lines without a text are left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold", style="bold")
    grid.add_column(overflow="fold")
    for name, text in rows:
        if text:
            grid.add_row(name, text)
    return grid


def word(text: str) -> Text:
    """A state, in the colour of its meaning."""
    return Text(text, style=_STYLES.get(text, ""))


def spaced(parts: Iterable[RenderableType]) -> Iterable[RenderableType]:
    """Parts with an empty line between them."""
    for number, part in enumerate(parts):
        if number:
            yield Text("")
        yield part
