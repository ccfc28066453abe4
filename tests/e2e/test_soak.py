"""A short soak, and that a soak would notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import soak


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


def test_a_pool_that_is_lost_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--kills", "3", "--seed", "3", "--set", "pool.owner=none"]
    assert soak.main(arguments) == 1
    said = capsys.readouterr().err
    assert "is not found" in said or "missed" in said
