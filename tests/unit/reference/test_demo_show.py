"""What the demo writes can be read on a narrow terminal, and is whole in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from engine_shim.reference.demo.show import Show

ROWS = [
    ("tokens equal to the resident run", "yes", "every logit bit too"),
    ("prefill buffers", "100.8 MiB", "resident would take 131.0 MiB"),
    ("rows found in the hot buffer", "67.2 %", "4019 selections of draft positions merged"),
    ("prefix hit, second request", "12288 tokens", "the shared beginning"),
    ("status samples without a contradiction", "1614", "of 1614"),
]


def shown(width: int) -> list[str]:
    """The lines of the table on a terminal of so many columns."""
    out = io.StringIO()
    Show(Console(file=out, width=width, force_terminal=True, color_system=None)).table("t", ROWS)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 45, 52, 60, 79, 80, 100, 200])
def test_every_word_is_there_at_any_width(width: int) -> None:
    lines = shown(width)
    assert all(len(line) <= width for line in lines)
    found = {word.strip("():") for line in lines for word in line.replace("│", " ").split()}
    assert found >= {word for row in ROWS for text in row for word in text.split()}


def test_a_row_is_a_line_where_there_is_room() -> None:
    assert len(shown(160)) == 1 + 2 + len(ROWS)


def test_a_name_is_a_line_where_the_third_column_has_room_left() -> None:
    assert any("│ status samples without a contradiction │" in line for line in shown(80))


def test_lines_into_a_pipe_are_not_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    show = Show()
    show.fact("word " * 25)
    show.table("t", ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 1 + 2 + len(ROWS)


def test_brackets_of_a_name_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show = Show()
    for say in (show.step, show.fact, show.failure):
        say("out/[red]")
    assert capsys.readouterr().out.count("out/[red]") == 3
