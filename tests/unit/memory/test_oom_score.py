"""server.oom_score_adj: a number holds or is refused; "auto" takes what it may."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvd.core.errors import LocalError
from kvd.memory.oom_score import AUTO_SCORE, set_oom_score

ROOT = Path(__file__).parents[3]


@pytest.fixture
def score(tmp_path: Path) -> Path:
    """The kernel's file, as it is for a process that nobody cared about."""
    file = tmp_path / "oom_score_adj"
    file.write_text("0\n")
    return file


class Refusing:
    """A file that takes nothing."""

    def read_text(self, encoding: str) -> str:
        return "200\n"

    def write_text(self, text: str, encoding: str) -> int:
        raise PermissionError(13, "Permission denied")


def test_number_that_the_kernel_does_not_take_is_refused() -> None:
    with pytest.raises(LocalError) as caught:
        set_oom_score(-500, Refusing())  # type: ignore[arg-type]
    assert str(caught.value) == (
        "oom_score_refused: server.oom_score_adj is -500, but the kernel did not take it from this "
        "process (Permission denied), which has 200. Let the service manager set it "
        "(OOMScoreAdjust=-500 in the unit), or choose a value that is not lower, or "
        '"auto".'
    )


def test_auto_that_is_not_permitted_changes_nothing() -> None:
    assert set_oom_score("auto", Refusing()) == 200  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "before", "after"),
    [
        (None, 7, 7),
        (-500, 0, -500),
        (300, 0, 300),
        (0, 0, 0),
        ("auto", 0, AUTO_SCORE),
        ("auto", 500, AUTO_SCORE),
        ("auto", -1000, -1000),  # the service manager has decided
        ("auto", -1, -1),
    ],
)
def test_what_holds_afterwards(asked: object, before: int, after: int, score: Path) -> None:
    score.write_text(f"{before}\n")
    assert set_oom_score(asked, score) == after  # type: ignore[arg-type]
    assert int(score.read_text()) == after


@pytest.mark.parametrize("text", ["", "x"])
def test_kernel_that_tells_nothing(text: str, score: Path) -> None:
    score.write_text(text)
    assert set_oom_score(None, score) == 0
    score.unlink()
    assert set_oom_score(None, score) == 0


def test_the_kernel_refuses_a_user_without_the_right() -> None:
    code = (
        "from kvd.memory.oom_score import set_oom_score\n"
        "from tests.unit.memory.powers import SYS_RESOURCE, give_up\n"
        "give_up(SYS_RESOURCE)\n"
        "print(set_oom_score(900), set_oom_score('auto') in (900, -900))\n"
        "set_oom_score(-1000)\n"
    )
    done = subprocess.run(
        (sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "oom_score_refused" in done.stderr
    assert done.stdout == "900 True\n"
