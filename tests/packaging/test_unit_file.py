"""The unit file of the daemon: what systemd itself says of it, and that it fits the daemon."""

from __future__ import annotations

import configparser
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.cli.daemon import parser
from kvd.config.load import load_config
from tests.capabilities import need_command

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "systemd" / "kvd.service"
SCRIPT = Path(sys.executable).with_name("kvd")


def section(name: str) -> dict[str, str]:
    """One section of the unit; keys keep their case."""
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT, encoding="utf-8")
    return dict(unit[name])


@pytest.mark.slow
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    analyze = need_command("systemd-analyze", "systemd")
    installed = section("Service")["ExecStart"].split()[0]
    text = UNIT.read_text(encoding="utf-8").replace(installed, str(SCRIPT))
    copy = tmp_path / UNIT.name
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(
        (analyze, "verify", "--man=no", str(copy)), capture_output=True, text=True, check=False
    )
    about_ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, about_ours) == (0, [])


def test_its_command_line_is_one_that_the_daemon_takes() -> None:
    arguments = shlex.split(section("Service")["ExecStart"])[1:]
    assert parser().parse_args(arguments).config == Path("/etc/kvd/kvd.toml")


def test_it_leaves_the_daemon_its_grace_and_its_runtime_directory() -> None:
    service = section("Service")
    config = load_config(ROOT / "etc" / "kvd.toml", {}, {}).config
    assert service["TimeoutStopSec"] == "30s"
    assert config.server.grace_period < 30_000_000_000
    assert (service["RuntimeDirectory"], service["RuntimeDirectoryMode"]) == ("kvd", "0700")
    assert service["Type"] == "notify"
