"""What a test needs from the machine: missing, it fails where `CI` is set and is skipped elsewhere.

A skipped test proves nothing, so the machine that judges a change must have everything; a person's
machine need not, and is told what would mend it::

    need_namespaces("net", "mount")
    if free_huge_pages() < 8:
        lacking("8 free huge pages", "sysctl -w vm.nr_hugepages=8")

What no command mends is another matter: see `processor_lacks`.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from typing import Any, Final, NoReturn

import pytest

OFF: Final = frozenset({"", "0", "false", "no"})


def lacking(what: str, remedy: str) -> NoReturn:
    """End the test: the machine lacks something, and `remedy` is the command that mends it."""
    text = f"this machine lacks {what}; as root: {remedy}"
    if os.environ.get("CI", "").lower() not in OFF:
        pytest.fail(text, pytrace=False)
    pytest.skip(text, allow_module_level=True)


def processor_lacks(what: str) -> NoReturn:
    """End the test: it needs instructions that this processor does not have.

    No command mends that, and which processor judges a change is not for the change to choose: so
    the test is skipped in CI, too, and `python -m tests` names it among what was not tested. With
    KVD_TEST_PROCESSOR=required it fails: for whoever wants to know that everything ran.
    """
    text = f"NOT TESTED: this processor has no {what}"
    if os.environ.get("KVD_TEST_PROCESSOR", "") == "required":
        pytest.fail(text, pytrace=False)
    pytest.skip(text, allow_module_level=True)


def need_module(name: str, remedy: str) -> Any:
    """Import a module that not every machine has, or end the test, or the module, that needs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        lacking(f"the Python package {name}", remedy)


def need_command(name: str, package: str) -> str:
    """Return the path of a program, or end the test naming the Debian package that has it."""
    path = shutil.which(name)
    if path is None:
        lacking(f"the program {name}", f"apt-get install {package}")
    return path


def need_namespaces(*kinds: str) -> None:
    """End the test unless this process may make namespaces of some kinds: net, mount, pid, user."""
    unshare = need_command("unshare", "util-linux")
    for kind in kinds:
        done = subprocess.run(
            (unshare, f"--{kind}", "--fork", "true"), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            reason = done.stderr.strip()
            lacking(f"the right to make a {kind} namespace ({reason})", "run the tests with sudo")


def need_mounts() -> None:
    """End the test unless this process may mount a file system, in a mount namespace of its own."""
    need_namespaces("mount")
    script = 'd=$(mktemp -d) && mount -t tmpfs none "$d"; s=$?; umount "$d"; rmdir "$d"; exit $s'
    done = subprocess.run(
        ("unshare", "--mount", "sh", "-c", script), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lacking(f"the right to mount ({done.stderr.strip()})", "run the tests with sudo")
