"""`kvd` as a process: what it refuses to start with, and what it says about that."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.reference.demo.processes import clean_environment
from kvd import __version__
from kvd.memory.memory_info import HugePagePool, read_memory_info
from tests.capabilities import lacking, need_command
from tests.integration.live_kvd import MIB, LiveKvd

LOCK = "kvd.lock"
SMALL = ("pool.size=1MiB", "pool.huge_pages=off", "pool.headroom=0B", "pool.owner=none")
NOBODY = 65_534


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as name:
        yield Path(name)


def run(
    *args: str, env: dict[str, str] | None = None, flags: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Run kvd to its end; returns the exit code and all that it said."""
    done = subprocess.run(
        [sys.executable, *flags, "-m", "kvd", *args],
        capture_output=True,
        text=True,
        env={**clean_environment(), **(env or {})},
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def refused(*settings: str, directory: Path) -> str:
    """What kvd says that refuses to start with these settings; it has left nothing."""
    args = [part for setting in (*SMALL, *settings) for part in ("--set", setting)]
    code, said = run("--runtime-dir", str(directory / "run"), *args)
    assert code == 1, said
    assert left(directory / "run") in ([], [LOCK])
    return said


def left(path: Path) -> list[str]:
    """Names in a runtime directory, [] when there is none."""
    return sorted(os.listdir(path)) if path.is_dir() else []


# Command line and configuration -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--no-such-option",), "unrecognized arguments"),
        (("--set", "pool.size"), "is not KEY=VALUE"),
        (("--set", "=5"), "is not KEY=VALUE"),
        (("--set",), "expected one argument"),
        (("surplus",), "unrecognized arguments"),
        (("--hold-ttl", "5s"), "--hold-ttl belongs to --hold"),
    ],
)
def test_wrong_usage_ends_with_2(args: tuple[str, ...], says: str) -> None:
    code, said = run(*args)
    assert code == 2
    assert says in said


def test_checks_that_are_off_are_refused() -> None:
    code, said = run("--check-config", flags=("-O",))
    assert code == 2
    assert "python -O" in said


def test_version_and_help() -> None:
    assert run("--version") == (0, f"kvd {__version__}\n")
    code, said = run("--help")
    assert code == 0
    assert "exit codes: 0 stopped as asked" in said


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("pool.sise=1MiB", "pool.sise: unknown key; did you mean pool.size?"),
        ("pool.size=1", "pool.size:"),
        ("pool.size=-1MiB", "pool.size:"),
        ("pool.size=1MB5", "pool.size:"),
        ("pool.size=99999TiB", "pool.size:"),
        ("pool.huge_pages=maybe", "pool.huge_pages:"),
        ("release.read_deadline=5", "release.read_deadline:"),
        ("limits.engines=0", "limits.engines:"),
        ("server.log_level=loud", "server.log_level:"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    directory: Path, setting: str, says: str
) -> None:
    said = refused(setting, directory=directory)
    key = setting.partition("=")[0]
    assert "the configuration has 1 problem(s):" in said
    assert says in said
    assert f"(flag --set {key})" in said
    assert said.endswith("Nothing was started.\n")


def test_everything_that_is_wrong_is_said_at_once(directory: Path) -> None:
    file = directory / "kvd.toml"
    file.write_text('[pool]\nsize = 5\nhuge_page = "off"\n[nonsense]\nx = 1\n')
    env = {"KVD_LIMITS_ENGINES": "many", "KVD_POOL_SIZES": "1MiB"}
    code, said = run("--config", str(file), "--set", "limits.waiters=-3", "--check-config", env=env)
    assert code == 1
    for part in (
        "6 problem(s)",
        f"(file {file}:2)",
        "pool.huge_page: unknown key; did you mean pool.huge_pages?",
        "nonsense: unknown section",
        "(env KVD_LIMITS_ENGINES)",
        "KVD_POOL_SIZES: unknown environment variable; did you mean KVD_POOL_SIZE?",
        "(flag --set limits.waiters)",
    ):
        assert part in said


def test_check_config_starts_nothing(directory: Path) -> None:
    file = directory / "kvd.toml"
    file.write_text('[pool]\nsize = "64TiB"\n')
    path = directory / "run"
    code, said = run("--config", str(file), "--runtime-dir", str(path), "--check-config")
    good = f"kvd: the configuration is good ({file}); "
    assert (code, said) == (0, good + "whether the memory is there is seen at the start\n")
    assert not path.exists()


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "binary", "not_toml"])
def test_a_file_that_cannot_be_read(directory: Path, kind: str) -> None:
    file = directory / "kvd.toml"
    if kind == "directory":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "binary":
        file.write_bytes(b"\xff\xfe[pool]")
    elif kind == "not_toml":
        file.write_text("[pool\n")
    code, said = run("--config", str(file), "--check-config")
    assert code == 1
    assert "1 problem(s)" in said
    assert str(file) in said


# Memory -------------------------------------------------------------------------------------------


def test_a_pool_larger_than_the_host(directory: Path) -> None:
    said = refused("pool.size=64TiB", directory=directory)
    assert said.startswith("kvd: memory_short: pool needs 64TiB")
    assert re.search(r"Set pool\.size to at most \d+", said)


def test_the_headroom_counts(directory: Path) -> None:
    said = refused("pool.size=64MiB", "pool.headroom=4TiB", directory=directory)
    assert "4TiB of headroom" in said
    assert "lower pool.headroom (4TiB)" in said


def test_huge_pages_that_are_missing(directory: Path) -> None:
    """The exact number to reserve is named, not just that there are too few."""
    for _ in range(10):
        pool = huge_page_pool()
        need = pool.free + 8
        said = refused(
            f"pool.size={need * pool.page_size // MIB}MiB",
            "pool.huge_pages=require",
            directory=directory,
        )
        if pool == huge_page_pool():
            break  # nobody else on this host took or reserved any meanwhile
    assert said.startswith(f"kvd: hugepages_short: pool needs {need} huge pages")
    assert f"{pool.free} are free" in said
    assert f"echo {pool.total + 8} > /proc/sys/vm/nr_hugepages" in said
    assert f"vm.nr_hugepages = {pool.total + 8}" in said


def huge_page_pool() -> HugePagePool:
    """Of the host's usual size."""
    info = read_memory_info()
    pool = info.pool_of(info.default_huge_page)
    assert pool is not None
    return pool


def test_a_numa_node_that_is_not_there(directory: Path) -> None:
    said = refused("pool.numa_node=1023", directory=directory)
    assert said.startswith("kvd: numa_unusable: pool is to be on NUMA node 1023, but kvd may use")
    assert 'Set numa_node to one of these, to "interleave" or to "any".' in said


def test_headers_must_fit_beside_the_pool(directory: Path) -> None:
    """The pool alone would fit: its pages are not taken yet when the headers are made."""
    size = read_memory_info().mem_available * 98 // 100 // MIB
    said = refused(f"pool.size={size}MiB", "pool.block_count_max=16777216", directory=directory)
    assert said.startswith("kvd: memory_short: pool-meta needs ")


def test_an_oom_score_that_the_kernel_does_not_take(directory: Path) -> None:
    setpriv = need_command("setpriv", "util-linux")
    run_path = directory / "run"
    drop = "-sys_resource"
    command = [setpriv, f"--bounding-set={drop}", f"--inh-caps={drop}"] if not os.getuid() else []
    done = subprocess.run(
        [
            *command,
            *(sys.executable, "-m", "kvd", "--runtime-dir", str(run_path)),
            *("--set", "server.oom_score_adj=-999"),
        ],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("kvd: oom_score_refused: server.oom_score_adj is -999, but the")
    assert "OOMScoreAdjust=-999 in the unit" in done.stderr
    assert left(run_path) == [LOCK]


def test_where_the_memory_is_and_how_it_is_kept() -> None:
    nodes = read_memory_info().nodes
    if not nodes:
        lacking("NUMA nodes (/sys/devices/system/node)", "mount -t sysfs sysfs /sys")
    asked = str(nodes[0].number)
    with LiveKvd(f"pool.numa_node={asked}", "pool.lock=true", "server.oom_score_adj=77") as kvd:
        status = kvd.status()
        pool = next(region for region in status["regions"] if region["name"] == "pool")
        assert pool["asked_bytes"] == pool["got_bytes"] == pool["populated_bytes"] == 4 * MIB
        assert (pool["node"], pool["node_bytes"]) == (asked, {asked: 4 * MIB})
        assert (pool["stray_bytes"], pool["locked"], pool["page_bytes"]) == (0, True, 4096)
        assert status["process"]["oom_score_adj"] == 77
        assert Path(f"/proc/{kvd.pid}/oom_score_adj").read_text() == "77\n"


# Runtime directory --------------------------------------------------------------------------------


def test_a_second_daemon_in_the_same_directory(directory: Path) -> None:
    with LiveKvd() as first:
        before = left(first.runtime_dir)
        code, said = run("--runtime-dir", str(first.runtime_dir), "--set", "pool.size=1MiB")
        assert code == 1
        assert said.startswith(f"kvd: already_running: another kvd (pid {first.pid}) holds")
        assert "--runtime-dir" in said
        assert left(first.runtime_dir) == before
        assert first.get("/readyz")[0] == 200


def test_two_daemons_beside_each_other() -> None:
    with LiveKvd() as first, LiveKvd() as second:
        assert first.status()["boot_id"] != second.status()["boot_id"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("open", "chmod 0700"),
        ("symlink", "it is a symbolic link"),
        ("file", "it is not a directory"),
        ("foreign", f"it belongs to uid {NOBODY}"),
        ("no_parent", "it cannot be created (No such file or directory)"),
        ("read_only", "it cannot be created"),
        ("long", "over the 107 that the system allows"),
        ("socket_is_file", "attach.sock in it is not a socket: remove it"),
        ("lock_is_link", "kvd.lock in it is a symbolic link"),
        ("lock_is_directory", "kvd.lock in it is"),
        ("lock_is_fifo", "kvd.lock in it is not a plain file"),
        ("lock_is_shared", "kvd.lock in it is not a plain file"),
        ("open_parent", "anybody could replace it"),
    ],
)
def test_a_runtime_directory_that_cannot_be_used(directory: Path, kind: str, says: str) -> None:
    path = directory / "run"
    target = directory / "target"
    if kind in ("symlink", "foreign", "open") or kind.startswith(("socket", "lock")):
        path.mkdir(0o700)
    if kind == "open":
        path.chmod(0o777)
    elif kind == "symlink":
        path.rename(target)
        path.symlink_to(target)
    elif kind == "file":
        path.write_text("")
    elif kind == "foreign":
        if os.getuid() != 0:
            lacking("the right to give a directory away", "run the tests with sudo")
        os.chown(path, NOBODY, NOBODY)
    elif kind == "no_parent":
        path = directory / "missing" / "run"
    elif kind == "read_only":
        path = Path("/proc/kvd-run")
    elif kind == "long":
        path = directory / ("x" * 100)
    elif kind == "socket_is_file":
        (path / "attach.sock").write_text("keep")
    elif kind == "open_parent":
        directory.chmod(0o777)
    elif kind == "lock_is_link":
        (path / LOCK).symlink_to(target)
    elif kind == "lock_is_directory":
        (path / LOCK).mkdir()
    elif kind == "lock_is_fifo":
        os.mkfifo(path / LOCK)
    elif kind == "lock_is_shared":
        target.write_text("keep")
        os.link(target, path / LOCK)
    code, said = run("--runtime-dir", str(path), "--set", "pool.size=1MiB")
    assert code == 1
    assert said.startswith("kvd: runtime_dir_unusable: runtime directory ")
    assert says in said
    if kind == "socket_is_file":
        assert (path / "attach.sock").read_text() == "keep"
    elif kind == "lock_is_shared":
        assert target.read_text() == "keep"


def test_a_relative_directory_is_one_below_where_kvd_is_started(directory: Path) -> None:
    code, said = run("--runtime-dir", "x" * 200, "--set", "pool.size=1MiB")
    assert code == 1
    assert str(Path.cwd()) in said


def test_sockets_of_a_killed_daemon_are_replaced(directory: Path) -> None:
    with LiveKvd() as kvd:
        boot_id = kvd.status()["boot_id"]
        kvd.stop(9)
        assert left(kvd.runtime_dir) == ["admin.sock", "attach.sock", "engine.sock", LOCK]
        kvd.start()
        assert kvd.status()["boot_id"] != boot_id
        assert kvd.stop() == 0
        assert left(kvd.runtime_dir) == [LOCK]
        assert (kvd.runtime_dir / LOCK).read_text() == ""


def test_a_socket_that_somebody_listens_on_is_not_taken(directory: Path) -> None:
    """Possible only when the lock of a running daemon was removed."""
    path = directory / "run"
    path.mkdir(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path / "attach.sock"))
        listener.listen()
        code, said = run("--runtime-dir", str(path), "--set", "pool.size=1MiB")
        assert code == 1
        assert "already_running" in said
        assert (path / "attach.sock").exists()
    shutil.rmtree(path)
