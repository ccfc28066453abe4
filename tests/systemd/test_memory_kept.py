"""The pool over every end that a service has: who keeps it, and that every byte is there again.

Two owners: systemd's descriptor store, and the holder as a service of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from tests.integration.live_kvd import until
from tests.systemd.conftest import CONFIG, PYTHON
from tests.systemd.machine import ROOT, Machine

KVD, HOLDER = "kvd.service", "kvd-hold.service"
COUNT = 8

OWNERS: Final = ("fdstore", "holder")

pytestmark = pytest.mark.slow


@pytest.fixture
def start(machine: Machine) -> Iterator[Callable[[str], None]]:
    """Give a function that starts kvd with an owner, and that owner's unit."""

    def started(owner: str) -> None:
        machine.write("/etc/kvd/kvd.toml", f'{CONFIG}owner = "{owner}"\n')
        if owner == "holder":
            machine.systemctl("start", HOLDER)
        machine.systemctl("start", KVD)

    yield started
    machine.run("systemctl", "stop", KVD, HOLDER, check=False)


def member(machine: Machine, what: str) -> int:
    """Let a member fill or check blocks; returns how many are hits."""
    env = ("env", f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1")
    command = (PYTHON, "-m", "tests.systemd.member", what, str(COUNT))
    return int(machine.run(*env, *command).splitlines()[-1])


def memory(machine: Machine) -> dict[str, Any]:
    """What kvd says of its memory, also while that needs an operator (kvctl ends with 4)."""
    found = json.loads(machine.run("kvctl", "status", "-o", "json", check=False))["memory"]
    assert isinstance(found, dict)
    return found


def up_again(machine: Machine, end: Callable[[str], object]) -> None:
    """End the main process of kvd in some way; returns when another one is ready."""
    pid = machine.show(KVD, "MainPID")
    end(pid)
    until(
        lambda: (
            machine.show(KVD, "MainPID") not in (pid, "0")
            and machine.show(KVD, "ActiveState") == "active"
        ),
        "another life of kvd",
        60.0,
    )


@pytest.mark.parametrize("owner", OWNERS)
def test_status_says_who_keeps_it(
    machine: Machine, start: Callable[[str], None], owner: str
) -> None:
    start(owner)
    assert memory(machine)["owner"] == owner
    assert {"engine", "daemon"} <= set(memory(machine)["survives"])


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("number", ["KILL", "STOP", "TERM", "ABRT"])
def test_every_block_is_there_after_an_end_of_kvd(
    machine: Machine, start: Callable[[str], None], owner: str, number: str
) -> None:
    """STOP: it hangs, and the watchdog ends it. TERM: it ends well, and systemd starts it again."""
    start(owner)
    assert member(machine, "fill") == COUNT
    up_again(machine, lambda pid: machine.run("kill", f"-{number}", pid))
    assert member(machine, "check") == COUNT
    assert machine.show(KVD, "NRestarts") == "1"


@pytest.mark.parametrize("owner", OWNERS)
def test_every_block_is_there_after_a_restart(
    machine: Machine, start: Callable[[str], None], owner: str
) -> None:
    start(owner)
    assert member(machine, "fill") == COUNT
    for _ in range(3):
        machine.systemctl("restart", KVD)
        assert member(machine, "check") == COUNT


def test_every_block_is_there_after_stop_and_start(
    machine: Machine, start: Callable[[str], None]
) -> None:
    start("holder")
    assert member(machine, "fill") == COUNT
    machine.systemctl("stop", KVD)
    assert machine.show(HOLDER, "ActiveState") == "active"
    machine.systemctl("start", KVD)
    assert member(machine, "check") == COUNT


def test_holder_that_dies_is_followed_by_another(
    machine: Machine, start: Callable[[str], None]
) -> None:
    start("holder")
    assert member(machine, "fill") == COUNT
    pid = machine.show(HOLDER, "MainPID")
    machine.run("kill", "-KILL", pid)
    until(lambda: machine.show(HOLDER, "MainPID") not in (pid, "0"), "another holder")
    until(lambda: memory(machine)["owner"] == "holder", "that kvd has found it")
    up_again(machine, lambda pid: machine.run("kill", "-KILL", pid))
    assert member(machine, "check") == COUNT


def test_stop_says_what_becomes_of_the_memory_in_the_store(
    machine: Machine, start: Callable[[str], None]
) -> None:
    """systemd keeps its store over a stop from 254 on; before, the pool begins anew."""
    start("fdstore")
    assert member(machine, "fill") == COUNT
    survives = "stop" in memory(machine)["survives"]
    machine.systemctl("stop", KVD)
    machine.systemctl("start", KVD)
    assert member(machine, "check") == (COUNT if survives else 0)


def test_kvd_takes_the_best_owner_there_is(machine: Machine, start: Callable[[str], None]) -> None:
    """auto: a holder that runs, where the store would not survive a stop; else the store."""
    start("auto")
    assert memory(machine)["owner"] == "fdstore"
    survives_stop = "stop" in memory(machine)["survives"]
    machine.systemctl("stop", KVD)
    machine.systemctl("start", HOLDER, KVD)
    assert memory(machine)["owner"] == ("fdstore" if survives_stop else "holder")


def test_enabled_units_start_the_holder_first(machine: Machine) -> None:
    machine.systemctl("enable", KVD, HOLDER)
    machine.systemctl("start", KVD)
    assert machine.show(HOLDER, "ActiveState") == "active"
    started = [int(machine.show(unit, "ActiveEnterTimestampMonotonic")) for unit in (HOLDER, KVD)]
    assert started == sorted(started)
    machine.systemctl("disable", KVD, HOLDER)


def test_holder_that_is_asked_for_and_does_not_run(
    machine: Machine, start: Callable[[str], None]
) -> None:
    machine.write("/etc/kvd/kvd.toml", f'{CONFIG}owner = "holder"\n')
    machine.run("systemctl", "start", KVD, check=False)
    assert any("systemctl enable --now kvd-hold.service" in x for x in machine.journal(KVD))


def test_holder_that_is_stopped_gives_the_memory_up(
    machine: Machine, start: Callable[[str], None]
) -> None:
    start("holder")
    machine.systemctl("stop", KVD)
    machine.systemctl("stop", HOLDER)
    assert machine.show(HOLDER, "Result") == "success"
    assert machine.run("ls", "/run/kvd").split() == ["kvd.lock"]
    assert "python" not in machine.run("sh", "-c", "cat /proc/[0-9]*/comm")
