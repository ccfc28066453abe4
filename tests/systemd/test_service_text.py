"""docs/service.md: its commands, run in the order in which a reader types them."""

from __future__ import annotations

import shlex

import pytest

from tests.docs.fenced import commands
from tests.systemd.machine import Machine

TEXT = "service.md"


@pytest.mark.slow
def test_every_command_does_what_it_is_for(machine: Machine) -> None:
    lines = [command.line for command in commands() if command.text == TEXT]
    assert lines
    for line in lines:
        machine.run(*shlex.split(line))
        if "stop" not in line and "reload" not in line:
            assert machine.show("kvd.service", "ActiveState") == "active"
    assert machine.run("systemctl", "is-enabled", "kvd-hold.service").strip() == "enabled"
    machine.systemctl("disable", "kvd.service", "kvd-hold.service")


def test_users_who_are_allowed_reach_the_sockets(machine: Machine) -> None:
    """With the mode that the text tells to set."""
    machine.write(
        "/etc/kvd/kvd.toml",
        '[pool]\nsize = "4MiB"\nhuge_pages = "off"\n[server]\nallowed_uids = [65534]\n',
    )
    drop_ins = [f"/etc/systemd/system/{unit}.service.d/mode.conf" for unit in ("kvd", "kvd-hold")]
    for path in drop_ins:
        machine.write(path, "[Service]\nRuntimeDirectoryMode=0711\n")
    machine.systemctl("daemon-reload")
    machine.systemctl("start", "kvd-hold.service", "kvd.service")
    modes = machine.run("stat", "-c", "%a %n", "/run/kvd", "/run/kvd/attach.sock").split()
    assert modes == ["711", "/run/kvd", "666", "/run/kvd/attach.sock"]
    machine.systemctl("stop", "kvd.service", "kvd-hold.service")
    machine.run("rm", *drop_ins)
    machine.systemctl("daemon-reload")
