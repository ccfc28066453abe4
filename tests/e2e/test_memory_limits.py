"""Control groups that really limit memory: refused before anything is taken, charged afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.reference.demo.processes import clean_environment
from tests.capabilities import lacking
from tests.integration.live_kvd import MIB, LiveKvd, until

JOIN = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
"""A shell's words before a command: run it in the group of the first argument."""


class Group:
    """A control group of the test's own, of either kind."""

    def __init__(self, path: Path, limit: str, usage: str) -> None:
        self.path = path
        self._limit = limit
        self._usage = usage
        path.mkdir()

    def below(self) -> Group:
        """Another one inside it."""
        if self._limit == "memory.max":
            (self.path / "cgroup.subtree_control").write_text("+memory")
        return Group(self.path / "inner", self._limit, self._usage)

    @property
    def limit_file(self) -> Path:
        return self.path / self._limit

    def limit(self, num_bytes: int) -> None:
        self.limit_file.write_text(str(num_bytes))

    def usage(self) -> int:
        return int((self.path / self._usage).read_text())

    def run(self, *command: str) -> list[str]:
        """The command that runs a command in it."""
        return ["sh", "-c", JOIN, "sh", str(self.path), *command]

    def close(self) -> None:
        until(lambda: not (self.path / "cgroup.procs").read_text(), "its processes to end")
        self.path.rmdir()


def mount_point(kind: str, option: str) -> Path | None:
    """Where a control group hierarchy is mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        if tail.split()[0] == kind and option in tail.split()[2].split(","):
            return Path(fields.split()[4])
    return None


@pytest.fixture
def group() -> Iterator[Group]:
    """A control group whose memory this test may limit."""
    name = f"kvd-test-{os.getpid()}"
    old, new = mount_point("cgroup", "memory"), mount_point("cgroup2", "rw")
    try:
        if old is not None:
            made = Group(old / name, "memory.limit_in_bytes", "memory.usage_in_bytes")
        elif new is not None and "memory" in (new / "cgroup.subtree_control").read_text():
            made = Group(new / name, "memory.max", "memory.current")
        else:
            lacking("a control group for memory", "mount -t cgroup -o memory none DIRECTORY")
    except OSError as error:
        lacking(f"a control group of its own ({error.strerror})", "run the tests with sudo")
    yield made
    made.close()


class GroupedKvd(LiveKvd):
    """A kvd in a control group."""

    def __init__(self, group: Group, *settings: str) -> None:
        super().__init__(*settings)
        self._command = group.run(*self._command)


def refusal(group: Group, directory: Path) -> str:
    """What a kvd with a pool of 512 MiB says that refuses to start in a group."""
    settings = ("pool.size=512MiB", "pool.huge_pages=off", "pool.headroom=0B")
    arguments = [part for setting in settings for part in ("--set", setting)]
    daemon = (sys.executable, "-m", "kvd", "--runtime-dir", str(directory / "run"), *arguments)
    done = subprocess.run(
        group.run(*daemon),
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_pool_larger_than_the_group_is_refused(group: Group, tmp_path: Path) -> None:
    group.limit(256 * MIB)
    said = refusal(group, tmp_path)
    assert said.startswith("kvd: memory_short: pool needs 512MiB")
    assert f"({group.limit_file} is 256MiB, " in said
    assert "Set pool.size to at most" in said


def test_tightest_group_counts_wherever_it_is(group: Group, tmp_path: Path) -> None:
    group.limit(256 * MIB)
    inner = group.below()
    inner.limit(8192 * MIB)
    assert f"({group.limit_file} is 256MiB, " in refusal(inner, tmp_path)
    inner.close()


def test_pool_is_charged_to_the_group_of_kvd(group: Group) -> None:
    group.limit(1024 * MIB)
    with GroupedKvd(group, "pool.size=256MiB", "pool.owner=none") as kvd:
        assert kvd.status()["ready"]
        assert group.usage() >= 256 * MIB
