"""The unit files: what systemd itself says of them, and that they fit the programs."""

from __future__ import annotations

import configparser
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.cli.daemon import parser
from kvd.config.load import load_config
from tests.capabilities import need_command

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "systemd").glob("*.service"))
SCRIPT = Path(sys.executable).with_name("kvd")

NEW_KEYS = {"FileDescriptorStorePreserve": 254}
"""Keys that systemd knows from a version on; older ones say so and go on."""

EXPOSURE_MAX = {"kvd.service": 2.5, "kvd-hold.service": 1.5}
"""What `systemd-analyze security` may come to: 0 is locked up, 10 is a program without any unit."""


def section(unit: str, name: str) -> dict[str, str]:
    """One section of a unit; keys keep their case."""
    read = configparser.ConfigParser(interpolation=None, strict=True)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read(ROOT / "systemd" / unit, encoding="utf-8")
    return dict(read[name])


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of systemd."""
    analyze = need_command("systemd-analyze", "systemd")
    return subprocess.run((analyze, *command), capture_output=True, text=True, check=False)


def unknown_yet(line: str) -> bool:
    """Whether an older systemd says only that it does not know a key of a newer one."""
    version = int(run("--version").stdout.split()[1].split(".")[0])
    return any(f"'{key}'" in line and version < since for key, since in NEW_KEYS.items())


@pytest.mark.slow
@pytest.mark.parametrize("unit", [path.name for path in UNITS])
def test_systemd_finds_nothing_wrong(unit: str, tmp_path: Path) -> None:
    for path in UNITS:
        installed = section(path.name, "Service")["ExecStart"].split()[0]
        text = path.read_text(encoding="utf-8").replace(installed, str(SCRIPT))
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    done = run("verify", "--man=no", str(tmp_path / unit))
    said = [line for line in done.stderr.splitlines() if unit in line and not unknown_yet(line)]
    assert (done.returncode, said) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("unit", sorted(EXPOSURE_MAX))
def test_exposure_is_low(unit: str) -> None:
    done = run("security", "--offline=true", "--no-pager", str(ROOT / "systemd" / unit))
    found = re.search(rf"Overall exposure level for {unit}: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= EXPOSURE_MAX[unit]


def test_every_unit_has_its_limit() -> None:
    assert {path.name for path in UNITS} == set(EXPOSURE_MAX)


def test_its_command_line_is_one_that_the_daemon_takes() -> None:
    arguments = shlex.split(section("kvd.service", "Service")["ExecStart"])[1:]
    assert parser().parse_args(arguments).config == Path("/etc/kvd/kvd.toml")


def test_the_holder_has_the_directory_and_the_configuration_of_the_daemon() -> None:
    arguments = shlex.split(section("kvd-hold.service", "Service")["ExecStart"])[1:]
    known = parser().parse_args(arguments)
    assert known.hold
    assert (known.config, known.runtime_dir) == (Path("/etc/kvd/kvd.toml"), "/run/kvd")


def test_it_leaves_the_daemon_its_grace_and_its_runtime_directory() -> None:
    service = section("kvd.service", "Service")
    config = load_config(ROOT / "etc" / "kvd.toml", {}, {}).config
    assert service["TimeoutStopSec"] == "30s"
    assert config.server.grace_period < 30_000_000_000
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"


def test_the_memory_is_kept_over_every_end() -> None:
    """One descriptor for each region and member, and the directory for whoever stays."""
    service = section("kvd.service", "Service")
    assert int(service["FileDescriptorStoreMax"]) >= 1024
    assert service["Restart"] == section("kvd-hold.service", "Service")["Restart"] == "always"
    for unit in ("kvd.service", "kvd-hold.service"):
        shared = section(unit, "Service")
        assert shared["RuntimeDirectory"] == "kvd"
        assert shared["RuntimeDirectoryMode"] == "0700"
        assert shared["RuntimeDirectoryPreserve"] == "yes"


def test_the_holder_is_there_before_kvd() -> None:
    assert section("kvd-hold.service", "Unit")["Before"] == "kvd.service"
    assert "kvd.service" in section("kvd-hold.service", "Install")["WantedBy"].split()
    # Bound to kvd's life it would end with it.
    assert not {"PartOf", "BindsTo", "Requires"} & set(section("kvd-hold.service", "Unit"))
