"""A short soak, and that a soak would notice."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import soak
from tests.capabilities import lacking


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_kills_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    assert soak.main(["--kills", "20", "--seed", "7", "--json", str(file)]) == 0
    rows = {(row["case"], row["metric"]): row["value"] for row in json.loads(file.read_text())}
    assert sum(rows[f"kill -9 of {name}", "times"] for name in ("kvd", "engine", "holder")) == 20
    assert rows["acknowledged blocks", "read and right"] > 100
    assert rows["descriptors", "more at the end"] <= 0
    assert rows["threads", "more at the end"] <= 0


def test_an_upgrade_under_running_engines_loses_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the kvd of the last commit to this one."""
    if subprocess.run(["git", "-C", str(soak.ROOT), "rev-parse", "HEAD~1"], check=False).returncode:
        lacking("the last commit", "git fetch --unshallow")
    assert soak.main(["--kills", "1", "--upgrade-from", "HEAD~1"]) == 0, capsys.readouterr().err
    assert soak.main(["--kills", "1", "--upgrade-from", "no-such-commit"]) == 1
    assert "cannot be had" in capsys.readouterr().err


def test_a_pool_that_is_lost_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--kills", "3", "--seed", "3", "--set", "pool.owner=none"]
    assert soak.main(arguments) == 1
    said = capsys.readouterr().err
    assert "is not found" in said or "missed" in said
