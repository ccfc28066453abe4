"""How the demo looks on a terminal: steps, progress bars, the table at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine_shim.reference import orders as od

PLAIN_WIDTH: Final = 160
READABLE: Final = 20
FRAME: Final = 10
"""Columns of a table of three that hold no text."""


class Show:
    """Writes to one console."""

    def __init__(self, console: Console | None = None) -> None:
        # Into a file or a pipe there is no width to fit.
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        self._console = console or Console(width=width)

    def step(self, text: str) -> None:
        """Say what begins."""
        self._console.print(f"[bold]>[/bold] {escape(text)}")

    def fact(self, text: str) -> None:
        """Say what was seen."""
        self._console.print(f"  {escape(text)}", highlight=False)

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Follow]:
        """Follow a piece of work; on a terminal as a bar."""
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
        )
        if not self._console.is_terminal:
            yield Follow(None, None)
            return
        with Progress(*columns, console=self._console) as bars:
            yield Follow(bars, bars.add_task(text, total=total))

    def table(self, title: str, rows: list[tuple[str, str, str]]) -> None:
        """The figures: (what, value, how to read it); where a table does not fit, as sentences."""
        whats, values = (max(len(row[column]) for row in rows) for column in (0, 1))
        room = self._console.width - FRAME - values
        if room < 1.5 * READABLE:
            self._console.print(f"[bold]{escape(title)}[/bold]")
            for what, value, reading in rows:
                self.fact(f"{what}: {value} ({reading})")
            return
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(no_wrap=room - whats >= READABLE)
        table.add_column(justify="right", no_wrap=True, style="bold")
        table.add_column()
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def failure(self, text: str) -> None:
        """Say what went wrong."""
        self._console.print(f"[bold red]failed:[/bold red] {escape(text)}", highlight=False)


class Follow:
    """Moves one progress bar, or none."""

    def __init__(self, bars: Progress | None, task: object) -> None:
        self._bars = bars
        self._task = task

    def __call__(self, news: od.Progress) -> None:
        """So much is done."""
        if self._bars is not None:
            self._bars.update(self._task, completed=news.done, total=news.total)  # type: ignore[arg-type]


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")
