"""The daemon and kvctl as a node has them: the wheel, its locked packages, and no engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.startup import ANSWER_SECONDS_MAX, MB, RESIDENT_MB_MAX, start_once
from kvd import __version__
from tests.packaging.conftest import ROOT, Run

pytestmark = pytest.mark.timeout(900)  # the first to need the venv makes it

NOISE = 15
"""How much slower than on a quiet machine an answer may come before it counts as broken."""

LOADED = """
import sys
import {module}
print(*sorted({{name.split(".")[0] for name in sys.modules}} & {names}))
"""


def loaded(run: Run, module: str, names: set[str]) -> set[str]:
    """Import a module in a new interpreter; returns which of some packages that loads."""
    done = run("python", "-c", LOADED.format(module=module, names=names))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_wrong_usage_is_refused(run: Run) -> None:
    done = run("kvd", "--set", "nonsense")
    assert done.returncode == 2
    assert "--set 'nonsense' is not KEY=VALUE" in done.stderr


def test_bad_configuration_is_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text("[pool]\nsise = '1GiB'\n", encoding="utf-8")
    done = run("kvd", "--check-config", "--config", str(file))
    assert done.returncode == 1
    assert "sise" in done.stderr
    assert "Nothing was started." in done.stderr


def test_kvctl_without_a_daemon_says_so(run: Run) -> None:
    done = run("kvctl", "status")
    assert done.returncode == 3
    assert "admin.sock" in done.stderr


@pytest.mark.parametrize("module", ["torch", "numpy", "pytest", "msgpack"])
def test_node_has_no_engine_and_no_test_tools(run: Run, module: str) -> None:
    done = run("python", "-c", f"import {module}")
    assert "ModuleNotFoundError" in done.stderr


def test_packages_of_the_node_are_complete(run: Run) -> None:
    done = run("python", "-m", "pip", "check")
    assert done.returncode == 0, done.stdout


def test_version(run: Run) -> None:
    assert run("kvd", "--version").stdout == f"kvd {__version__}\n"


def test_shipped_configuration_is_good(run: Run) -> None:
    done = run("kvd", "--check-config", "--config", str(ROOT / "etc" / "kvd.toml"))
    assert done.returncode == 0, done.stderr
    assert "the configuration is good" in done.stdout


def test_kvctl_help(run: Run) -> None:
    done = run("kvctl", "--help")
    assert done.returncode == 0, done.stderr
    assert "status" in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)


def test_it_is_the_installed_kvd(run: Run, node: Path) -> None:
    done = run("python", "-c", "import kvd, kvd_kernels.host; print(kvd.__file__)")
    assert done.stdout.startswith(str(node)), done.stderr


def test_server_loads_no_engine(run: Run) -> None:
    heavy = {"torch", "numpy", "engine_shim", "vllm"}
    assert loaded(run, "kvd.server.app", heavy | {"zmq"}) == {"zmq"}


def test_kvctl_loads_no_server(run: Run) -> None:
    server = {"aiohttp", "zmq", "uvloop", "structlog", "prometheus_client", "kvd_kernels"}
    assert loaded(run, "kvd.cli.kvctl", server | {"typer"}) == {"typer"}


def test_shim_client_needs_no_torch(run: Run) -> None:
    """An engine's scheduler process speaks with kvd without its tensors."""
    assert loaded(run, "engine_shim.client", {"torch", "numpy", "zmq"}) == {"zmq"}


def test_daemon_starts_soon_and_stays_small(node: Path) -> None:
    """Answers long before a machine under load would be given up on; weighs what it may.

    How soon on a quiet machine is what `python -m bench.startup` measures.
    """
    start = start_once((str(node / "bin" / "kvd"),), pool="64MiB")
    print(f"{start} (aim: {ANSWER_SECONDS_MAX} s, {RESIDENT_MB_MAX} MB)")
    assert start.livez < NOISE * ANSWER_SECONDS_MAX
    assert start.first_state < NOISE * ANSWER_SECONDS_MAX
    assert start.phase in ("starting", "ready")
    assert 0 <= start.percent <= 100
    assert start.resident_bytes < RESIDENT_MB_MAX * MB
    assert start.exit_code == 0


def test_pool_too_large_for_the_node_is_refused(node: Path) -> None:
    with pytest.raises(RuntimeError, match="memory_short"):
        start_once((str(node / "bin" / "kvd"),), pool="32TiB")
