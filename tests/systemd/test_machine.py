"""The machine of these tests: nothing outside it can be written from inside it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.integration.live_kvd import until
from tests.systemd import machine as module
from tests.systemd.machine import ROOT, Machine, child_named, needed_paths

WRITABLE = "touch {0}/kvd-machine-probe 2> /dev/null && echo written; rm -f {0}/kvd-machine-probe"


def test_directory_that_others_write_to_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tempfile.gettempdir()
    monkeypatch.setattr("sys.path", [temporary, "", ".", "/"])
    assert not [path for path in needed_paths() if Path(temporary).is_relative_to(path)]
    monkeypatch.setattr("sys.base_prefix", temporary)
    with pytest.raises(AssertionError):
        needed_paths()


def test_whole_disk_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOT", Path("/srv"))
    with pytest.raises(AssertionError, match="/srv is too much to share"):
        needed_paths()


def test_children_that_end_while_they_are_looked_at_are_not_the_machine() -> None:
    command = ("sh", "-c", "while :; do /bin/true; done")
    with subprocess.Popen(command) as shell:
        try:
            assert {child_named("systemd", shell.pid) for _ in range(3000)} == {0}
            until(lambda: child_named("true", shell.pid) > 0, "a child that lives for a moment")
        finally:
            shell.kill()
    assert child_named("systemd", shell.pid) == 0


def test_what_is_shared_is_read_only(booted: Machine) -> None:
    for path in (*needed_paths(), str(ROOT / "tests"), "/sys", "/proc/sys/kernel"):
        assert booted.run("sh", "-c", WRITABLE.format(path)) == ""


def test_kernel_parameters_cannot_be_set(booted: Machine) -> None:
    name = "/proc/sys/vm/nr_hugepages"
    before = Path(name).read_text()
    said = booted.run("sh", "-c", f"echo 1 > {name}", check=False)
    assert "Read-only file system" in said
    assert Path(name).read_text() == before


def test_its_temporary_files_and_devices_are_its_own(booted: Machine, tmp_path: Path) -> None:
    outside = tmp_path / "kept"
    outside.write_text("kept")
    assert booted.run("ls", str(outside), check=False).startswith("ls: cannot access")
    booted.run("systemd-tmpfiles", "--create", "--remove", "--boot", check=False)
    assert outside.read_text() == "kept"
    booted.run("touch", "/dev/shm/kvd-machine-probe", "/tmp/kvd-machine-probe")
    for directory in ("/dev/shm", "/dev", "/tmp", "/run"):
        assert "kvd-machine-probe" not in os.listdir(directory)
        assert os.stat(directory).st_dev != os.stat(booted.root / directory[1:]).st_dev


def test_the_root_of_this_machine_is_not_mounted_in_it(booted: Machine) -> None:
    """Whoever enters the mounts alone stands in the root of the machine, not in the one outside."""
    seen = booted.run("sh", "-c", "nsenter -t 1 -m -- cat /proc/self/mountinfo")
    roots = [line.split() for line in seen.splitlines() if line.split()[4] == "/"]
    assert [fields[fields.index("-") + 1] for fields in roots] == ["overlay"]


def test_it_has_no_processes_of_others(booted: Machine) -> None:
    assert booted.run("cat", "/proc/1/comm") == "systemd\n"
    assert "python" not in booted.run("sh", "-c", "cat /proc/[0-9]*/comm")
