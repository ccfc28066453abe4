"""systemd/kvd.service under a real systemd: its start, its ends, and what is seen meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.live_kvd import until
from tests.systemd.conftest import CONFIG
from tests.systemd.machine import Machine

KVD = "kvd.service"
SLOW_START = CONFIG.replace("64MiB", "1GiB") + 'populate_step = "2MiB"\n'
START_SECONDS = 60.0
SOCKETS = ["admin.sock", "attach.sock", "engine.sock"]

pytestmark = pytest.mark.slow


@contextmanager
def changed(machine: Machine, text: str) -> Iterator[None]:
    """The unit with settings on top."""
    drop_in = f"/etc/systemd/system/{KVD}.d/zz-changed.conf"
    machine.write(drop_in, text)
    machine.systemctl("daemon-reload")
    try:
        yield
    finally:
        machine.systemctl("stop", KVD)
        machine.run("rm", drop_in)
        machine.systemctl("daemon-reload")


def status(machine: Machine) -> dict[str, Any]:
    """What kvd says of itself."""
    document = json.loads(machine.run("kvctl", "status", "-o", "json"))
    assert isinstance(document, dict)
    return document


def left(machine: Machine) -> list[str]:
    """Names in the runtime directory."""
    return machine.run("ls", "/run/kvd").split()


def restarted(machine: Machine, before: str) -> str:
    """Wait until kvd is up again with another process; returns its pid."""

    def is_up() -> bool:
        now = machine.show(KVD, "MainPID")
        return now not in (before, "0") and machine.show(KVD, "ActiveState") == "active"

    until(is_up, "a new life of kvd", START_SECONDS)
    return machine.show(KVD, "MainPID")


# Starts that fail ---------------------------------------------------------------------------------


def test_refused_start_says_why_and_is_given_up(machine: Machine) -> None:
    machine.write("/etc/kvd/kvd.toml", CONFIG.replace("64MiB", "64TiB"))
    with changed(machine, "[Unit]\nStartLimitBurst=3\n"):
        said = machine.run("systemctl", "start", KVD, check=False)
        assert "failed" in said
        until(lambda: machine.show(KVD, "ActiveState") == "failed", "giving up", START_SECONDS)
        assert machine.show(KVD, "NRestarts") in ("2", "3")
        refusals = [line for line in machine.journal(KVD) if line.startswith("kvd: memory_short")]
        assert len(refusals) >= 3
        assert "Set pool.size to at most" in refusals[0]
        assert machine.show(KVD, "StatusText").startswith("refused to start: memory_short: pool")


def test_broken_configuration_is_named_line_by_line(machine: Machine) -> None:
    machine.write("/etc/kvd/kvd.toml", '[pool]\nsize = 5\nhuge_page = "off"\n')
    with changed(machine, "[Unit]\nStartLimitBurst=1\n"):
        machine.run("systemctl", "start", KVD, check=False)
        journal = machine.journal(KVD)
    assert any("pool.huge_page: unknown key; did you mean pool.huge_pages?" in x for x in journal)
    assert any(line.startswith("  pool.size:") for line in journal)


# The normal life ----------------------------------------------------------------------------------


def test_start_returns_when_kvd_is_ready(machine: Machine) -> None:
    machine.systemctl("start", KVD)
    assert status(machine)["ready"]
    assert machine.show(KVD, "StatusText") == "ready: pool of 64MiB, 0 engines, 0 members"
    assert sorted(left(machine)) == [*SOCKETS, "kvd.lock"]
    pid = machine.show(KVD, "MainPID")
    assert machine.run("cat", "/run/kvd/kvd.lock").strip() == pid
    assert machine.run("stat", "-c", "%a %U", "/run/kvd").strip() == "700 root"


def test_status_shows_how_far_a_start_is(machine: Machine) -> None:
    machine.write(
        "/etc/kvd/kvd.toml",
        SLOW_START,
    )
    machine.systemctl("start", "--no-block", KVD)
    seen = []

    def is_active() -> bool:
        seen.append(machine.show(KVD, "StatusText"))
        return machine.show(KVD, "ActiveState") == "active"

    until(is_active, "that it is ready", START_SECONDS)
    pattern = r"starting: (\d+)% of the pool \(1GiB\) is populated"
    percents = [int(found[1]) for text in seen if (found := re.fullmatch(pattern, text))]
    assert percents == sorted(percents)
    assert len(set(percents)) > 1


def test_journal_has_each_event_as_a_document(machine: Machine) -> None:
    machine.systemctl("start", KVD)
    boot_id = status(machine)["boot_id"]
    machine.systemctl("stop", KVD)
    events = [json.loads(line) for line in machine.journal(KVD) if line.startswith("{")]
    names = [event["event"] for event in events]
    first = next(i for i, event in enumerate(events) if event.get("boot_id") == boot_id)
    assert names[first:] == ["started", "ready", "stopped"]


def test_stop_leaves_nothing_but_the_lock_file(machine: Machine) -> None:
    machine.systemctl("start", KVD)
    machine.systemctl("stop", KVD)
    assert left(machine) == ["kvd.lock"]
    assert machine.show(KVD, "Result") == "success"
    assert machine.show(KVD, "ExecMainStatus") == "0"
    assert machine.show(KVD, "NRestarts") == "0"
    assert "python" not in machine.run("sh", "-c", "cat /proc/[0-9]*/comm")


def test_stop_while_it_starts(machine: Machine) -> None:
    machine.write("/etc/kvd/kvd.toml", SLOW_START)
    machine.systemctl("start", "--no-block", KVD)
    until(lambda: machine.show(KVD, "StatusText").startswith("starting"), "that it starts")
    machine.systemctl("stop", KVD)
    assert machine.show(KVD, "ActiveState") == "inactive"
    assert machine.show(KVD, "Result") == "success"
    assert left(machine) == ["kvd.lock"]


# Ends of every kind -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["KILL", "SEGV"])
def test_crash_is_followed_by_a_new_life(machine: Machine, number: str) -> None:
    machine.systemctl("start", KVD)
    pid, boot_id = machine.show(KVD, "MainPID"), status(machine)["boot_id"]
    machine.systemctl("kill", f"--signal={number}", "--kill-whom=main", KVD)
    assert restarted(machine, pid) != pid
    assert machine.show(KVD, "NRestarts") == "1"
    again = status(machine)
    assert again["ready"]
    assert again["boot_id"] != boot_id


def test_end_that_nobody_asked_systemd_for_is_no_stop(machine: Machine) -> None:
    """Restart=always: kvd ended well, since somebody sent it SIGTERM."""
    machine.systemctl("start", KVD)
    pid = machine.show(KVD, "MainPID")
    machine.run("kill", "-TERM", pid)
    restarted(machine, pid)
    assert machine.show(KVD, "NRestarts") == "1"


def test_pings_come_from_a_kvd_that_serves(machine: Machine) -> None:
    machine.systemctl("start", KVD)
    stamps = {machine.show(KVD, "WatchdogTimestampMonotonic")}

    def pinged() -> bool:
        stamps.add(machine.show(KVD, "WatchdogTimestampMonotonic"))
        return len(stamps) > 8  # four in each limit of two seconds: twice the limit

    until(pinged, "pings")
    assert machine.show(KVD, "NRestarts") == "0"
    assert status(machine)["ready"]


def test_kvd_that_hangs_is_killed_and_started_again(machine: Machine) -> None:
    machine.systemctl("start", KVD)
    pid = machine.show(KVD, "MainPID")
    machine.run("kill", "-STOP", pid)
    restarted(machine, pid)
    assert machine.show(KVD, "NRestarts") == "1"
    assert any("Watchdog timeout" in line for line in machine.journal(KVD))
    assert status(machine)["ready"]


# What the unit lets it do -------------------------------------------------------------------------


IPC_LOCK, SYS_NICE, SYS_RESOURCE = 1 << 14, 1 << 23, 1 << 24


def powers(machine: Machine, pid: str) -> int:
    """The capabilities that a process could have."""
    found = re.search(r"CapBnd:\s+(\w+)", machine.run("cat", f"/proc/{pid}/status"))
    assert found
    return int(found[1], 16)


def oom_score(machine: Machine) -> int:
    """How readily the kernel ends kvd."""
    return int(machine.run("cat", f"/proc/{machine.show(KVD, 'MainPID')}/oom_score_adj"))


def test_memory_as_configured_under_the_restrictions_of_the_unit(machine: Machine) -> None:
    extra = 'numa_node = "0"\nlock = true\n[server]\noom_score_adj = 250\n'
    machine.write("/etc/kvd/kvd.toml", CONFIG + extra)
    machine.systemctl("start", KVD)
    assert oom_score(machine) == 250
    pool = next(region for region in status(machine)["regions"] if region["name"] == "pool")
    assert (pool["node"], pool["node_bytes"]) == ("0", {"0": 64 << 20})
    assert pool["locked"]


def test_it_is_the_last_to_be_ended_when_memory_runs_out(machine: Machine) -> None:
    """As far as this machine lets its root: a sandbox may keep that right to itself."""
    machine.systemctl("start", KVD)
    expected = -900 if powers(machine, "1") & SYS_RESOURCE else 0
    assert oom_score(machine) == expected
    assert status(machine)["process"]["oom_score_adj"] == expected


def test_it_has_no_powers_that_it_does_not_need(machine: Machine) -> None:
    machine.systemctl("start", KVD)
    pid = machine.show(KVD, "MainPID")
    allowed = powers(machine, "1") & (IPC_LOCK | SYS_NICE | SYS_RESOURCE)
    assert powers(machine, pid) == allowed
    said = machine.run("cat", f"/proc/{pid}/status")
    assert re.search(r"NoNewPrivs:\s+1\n", said)
    assert re.search(r"Seccomp:\s+2\n", said)
    inside = ("nsenter", "-t", pid, "-m", "-r", "--")
    assert "Read-only" in machine.run(*inside, "touch", "/etc/kvd/x", check=False)


@pytest.mark.usefixtures("huge_pages")
def test_huge_pages_under_the_restrictions_of_the_unit(machine: Machine) -> None:
    config = CONFIG.replace("64MiB", "8MiB").replace('"off"', '"require"')
    machine.write("/etc/kvd/kvd.toml", config)
    machine.systemctl("start", KVD)
    pool = next(region for region in status(machine)["regions"] if region["name"] == "pool")
    assert (pool["page_kind"], pool["page_bytes"]) == ("hugetlb", 2 << 20)
    assert pool["populated_bytes"] == 8 << 20
