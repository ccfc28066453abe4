"""A machine with the units of this checkout installed, one for all tests of the tier."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.systemd.machine import ROOT, Machine, needed_paths
from tests.unit.memory import conftest as memory

PYTHON: Final = sys.executable

huge_pages = memory.huge_pages

CONFIG: Final = """\
[pool]
size = "64MiB"
huge_pages = "off"
headroom = "0B"
"""

# What differs from the shipped unit: where the interpreter of a test environment lives (a home that
# the unit hides), and a watchdog that does not keep the tests waiting.
DROP_IN: Final = """\
[Service]
ProtectHome=tmpfs
BindReadOnlyPaths={paths}
Environment=PYTHONPATH={root}
{more}
"""

MORE: Final = {"kvd.service": "WatchdogSec=2s"}


@pytest.fixture(scope="session")
def booted() -> Iterator[Machine]:
    """The machine; its units are installed as the documentation says."""
    with tempfile.TemporaryDirectory(prefix="kvd-machine-", ignore_cleanup_errors=True) as name:
        scratch = Path(name) / "disk"
        scratch.mkdir()
        machine = Machine(scratch)
        try:
            install(machine)
            yield machine
        finally:
            machine.close()


def install(machine: Machine) -> None:
    """Put the programs, the units and what tests change of these into a machine."""
    python = shlex.quote(PYTHON)
    for program, module in (("kvd", "kvd"), ("kvctl", "kvd.cli.kvctl")):
        script = f'#!/bin/sh\nexec {python} -m {module} "$@"\n'
        machine.write(f"/usr/local/bin/{program}", script, 0o755)
    for unit in (ROOT / "systemd").glob("*.service"):
        machine.write(f"/etc/systemd/system/{unit.name}", unit.read_text(encoding="utf-8"))
        more = MORE.get(unit.name, "")
        drop_in = DROP_IN.format(paths=" ".join(needed_paths()), root=ROOT, more=more)
        machine.write(f"/etc/systemd/system/{unit.name}.d/test.conf", drop_in)
    machine.systemctl("daemon-reload")


@pytest.fixture
def machine(booted: Machine) -> Iterator[Machine]:
    """The machine with kvd stopped, its counts at zero and its configuration as above."""
    booted.write("/etc/kvd/kvd.toml", CONFIG)
    yield booted
    booted.systemctl("stop", "kvd.service", "kvd-hold.service")
    booted.run("systemctl", "reset-failed", check=False)
