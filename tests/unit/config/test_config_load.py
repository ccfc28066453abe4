"""Loading: every mistake is named in one report, and each value knows where it came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.config.keys import all_keys, value_of
from kvd.config.load import LoadedConfig, describe, load_config, plan_reload
from kvd.config.model import Config, PoolConfig
from kvd.core.errors import ConfigError
from kvd.core.units import GIB, MIB


def problems(
    toml: str | bytes,
    tmp_path: Path,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> list[str]:
    """Load a file of this content, which must fail, and return the report."""
    path = tmp_path / "kvd.toml"
    path.write_bytes(toml.encode() if isinstance(toml, str) else toml)
    with pytest.raises(ConfigError) as caught:
        load_config(path, env or {}, flags or {})
    return [problem.replace(str(path), "FILE") for problem in caught.value.problems]


def load(
    tmp_path: Path,
    toml: str = "",
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Load a file of this content, which must succeed."""
    path = tmp_path / "kvd.toml"
    path.write_text(toml)
    return load_config(path, env or {}, flags or {})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("size = 64", 'pool.size: 64 has no unit: write the unit, in quotes, e.g. "64GiB"'),
        ("size = 1.5", 'pool.size: 1.5 has no unit: write the unit, in quotes, e.g. "64GiB"'),
        ('size = "64"', 'pool.size: "64" has no unit: write the unit, e.g. "64GiB"'),
        ('size = "64GB"', 'pool.size: "64GB" has the unknown unit GB: write GiB'),
        ('size = "1KiB"', 'pool.size: "1KiB" is not allowed: must be between 64KiB and 64TiB'),
        ('size = "65TiB"', 'pool.size: "65TiB" is not allowed: must be between 64KiB and 64TiB'),
        ("size = true", "pool.size: expected a size in quotes"),
        ("size = []", "pool.size: expected a size in quotes"),
        ("size = 1979-05-27", 'e.g. "64GiB", got a date or time'),
        ('huge_pages = "yes"', '"yes" is not allowed: must be one of require, prefer, off'),
        ("huge_pages = true", "pool.huge_pages: expected a text in quotes, got a boolean"),
        ('block_count_max = "9"', "pool.block_count_max: expected a whole number, got a text"),
        ("block_count_max = 9.0", "pool.block_count_max: expected a whole number, got a fraction"),
        ("block_count_max = true", "pool.block_count_max: expected a whole number, got a boolean"),
        ("block_count_max = 0", 'pool.block_count_max: "0" is not allowed: must be between 1'),
        ("sise = 1", "pool.sise: unknown key; did you mean pool.size?"),
        ("lookup_lease = 1", "pool.lookup_lease: unknown key; did you mean leases.lookup_lease?"),
        ("zzz = 1", "pool.zzz: unknown key; known are pool.size, pool.huge_pages"),
        ('"a\\nb" = 1', "pool.a?b: unknown key; known are pool.size"),
        ("[pool.size]", "pool.size: expected a size in quotes"),
    ],
)
def test_file_value_refused(line: str, problem: str, tmp_path: Path) -> None:
    (found,) = problems(f"# a comment\n\n[pool]\n{line}\n", tmp_path)
    assert problem in found
    assert found.endswith("(file FILE:4)") or '"a' in line or line == "[pool.size]"


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("[pol]\n", "pol: unknown section; did you mean [pool]? (file FILE:1)"),
        ("\nfoo = 1\n", "foo: unknown section; known are server, pool, regions"),
        ("lookup_lease = 1\n", "lookup_lease: unknown section; did you mean leases.lookup_lease?"),
        ("pool = 3\n", "pool: is a section: write [pool] and its keys below it (file FILE:1)"),
        ("[[pool]]\nsize = '1GiB'\n", "pool: is a section: write [pool]"),
        ("[pool]\nsize = \n", "FILE: is not TOML: Invalid value (at line 2, column 8)"),
        ("[pool]\nsize = '1GiB'\nsize = '2GiB'\n", "FILE: is not TOML: Cannot overwrite a value"),
        (b"[pool]\n\xff = 1\n", "FILE: is not UTF-8 at byte 7"),
        (b"#" * ((1 << 20) + 1), "FILE: has 1048577 bytes, over the limit of 1048576"),
    ],
)
def test_file_refused(toml: str | bytes, problem: str, tmp_path: Path) -> None:
    (found,) = problems(toml, tmp_path)
    assert problem in found


def test_file_that_is_missing_or_no_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, problem in [
        (tmp_path / "absent.toml", "cannot be read: No such file or directory"),
        (tmp_path, "is not a regular file"),
        (fifo, "is not a regular file"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(path, {}, {})
        assert caught.value.problems == [f"{path}: {problem}"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("KVD_POOL_SIZE", "", 'pool.size: "" is not a size'),
        ("KVD_POOL_SIZE", "64", 'write the unit, e.g. "64GiB"'),
        ("KVD_POOL_SISE", "1GiB", "unknown environment variable; did you mean KVD_POOL_SIZE?"),
        ("KVD_POLO_SIZE", "1GiB", "unknown environment variable; did you mean KVD_POOL_SIZE?"),
        ("KVD_LIMITS_Q", "1", "KVD_LIMITS_Q: unknown environment variable"),
        ("KVD_LIMITS_ENGINES", "many", 'limits.engines: "many" is not a whole number'),
        ("KVD_LIMITS_ENGINES", "9" * 30, "is too large"),
        ("KVD_LIMITS_ENGINES", "-1", '"-1" is not allowed: must be between 1 and 1024'),
        ("KVD_METRICS_ENABLED", "yes", '"yes" is neither true nor false; allowed: true or false'),
        ("KVD_SERVER_ALLOWED_UIDS", "1000,", '"" is not a whole number'),
        ("KVD_SERVER_ALLOWED_UIDS", "4294967295", "must be a list of user ids between 0 and"),
        ("KVD_SERVER_OOM_SCORE_ADJ", "1001", 'between -1000 and 1000, "auto" or "none"'),
        ("KVD_SERVER_OOM_SCORE_ADJ", "never", '"never" is not a whole number'),
        ("KVD_POOL_NUMA_NODE", "", "must be any, interleave or the number of a node"),
        ("KVD_POOL_NUMA_NODE", "-1", "must be any, interleave or the number of a node"),
        ("KVD_REGIONS_NUMA_NODE", "0,1", "must be any, interleave or the number of a node"),
        ("KVD_POOL_LOCK", "1", '"1" is neither true nor false'),
        ("KVD_RUNTIME_DIR", "run/kvd", "must be an absolute path, or empty"),
        ("KVD_RUNTIME_DIR", "/run/a\x00b", "must be an absolute path, or empty"),
        ("KVD_PEERS_LISTEN_HOST", "127.0.0.1:80", "an address or host name, without a port"),
        ("KVD_PEERS_LISTEN_HOST", "tcp://0.0.0.0", "an address or host name, without a port"),
    ],
)
def test_environment_refused(name: str, text: str, problem: str, tmp_path: Path) -> None:
    (found,) = problems("", tmp_path, env={name: text})
    assert problem in found
    assert found.endswith(f"(env {name})")


def test_environment_of_others_is_left_alone(tmp_path: Path) -> None:
    env = {"KVD_ENV": "x", "POOL_SIZE": "y", "kvd_pool_size": "z", "PATH": "/bin"}
    assert load(tmp_path, env=env).config == Config()


def test_two_variables_for_the_runtime_dir_must_agree(tmp_path: Path) -> None:
    env = {"KVD_RUNTIME_DIR": "/run/a", "KVD_SERVER_RUNTIME_DIR": "/run/b"}
    assert problems("", tmp_path, env=env) == [
        "server.runtime_dir: KVD_SERVER_RUNTIME_DIR and KVD_RUNTIME_DIR differ: "
        "set only one of them"
    ]
    env["KVD_SERVER_RUNTIME_DIR"] = "/run/a"
    assert load(tmp_path, env=env).config.server.runtime_dir == "/run/a"


@pytest.mark.parametrize(
    ("flag", "text", "problem"),
    [
        ("pool.size", "64", '"64" has no unit'),
        ("pool.siez", "1GiB", "pool.siez: unknown key; did you mean pool.size?"),
        ("size", "1GiB", "size: unknown key; did you mean pool.size?"),
        ("relase.query_atempts", "1", "did you mean release.query_attempts?"),
        ("xyzzy", "1", "xyzzy: unknown key; known are server, pool"),
        ("release.query_attempts", "1.5", '"1.5" is not a whole number'),
        ("pool.eviction", "fifo", "must be one of lru, arc"),
        ("pool.high_water", "99%", '"99%" is not a number such as 0.95'),
        ("pool.high_water", "nan", '"nan" is not a number such as 0.95'),
        ("pool.high_water", ".", '"." is not a number such as 0.95'),
        ("pool.high_water", "1.01", "must be between 0.5 and 1.0"),
        ("pool.low_water", "0.2", "must be between 0.25 and 1.0"),
    ],
)
def test_flag_refused(flag: str, text: str, problem: str, tmp_path: Path) -> None:
    (found,) = problems("", tmp_path, flags={flag: text})
    assert problem in found
    assert found.endswith(f"(flag --set {flag})")


def test_everything_wrong_is_in_one_report(tmp_path: Path) -> None:
    toml = '[pool]\nsize = 4\nhuge = "off"\n[relase]\nx = 1\n[limits]\nengines = 0\n'
    found = problems(
        toml,
        tmp_path,
        env={"KVD_POOL_HEADROOM": "1GB"},
        flags={"peers.connect_timeout": "3min", "pool.eviction": "fifo"},
    )
    assert [problem.partition(":")[0] for problem in found] == [
        "pool.size",
        "pool.huge",
        "relase",
        "limits.engines",
        "pool.headroom",
        "pool.eviction",
        "peers.connect_timeout, peers.transfer_deadline",
    ]
    assert all(problem.isprintable() for problem in found)


def test_a_value_that_is_replaced_is_checked_too(tmp_path: Path) -> None:
    (found,) = problems("[pool]\nsize = 4\n", tmp_path, flags={"pool.size": "2GiB"})
    assert found.startswith("pool.size: 4 has no unit")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"server.frame_size_max": "2MiB"}, "frame_holds_hashes"),
        ({"limits.blocks_per_request": "200000"}, "frame_holds_hashes"),
        ({"peers.transfer_deadline": "4s", "release.read_deadline": "1s"}, "connect_within"),
        ({"release.read_deadline": "3min", "readiness.oldest_wait_max": "1h"}, "read_within"),
        ({"readiness.oldest_wait_max": "7s"}, "cure_before_unready"),
        ({"release.query_attempts": "1000"}, "cure_before_unready"),
        ({"pool.low_water": "0.995"}, "low_below_high"),
        ({"store.names": "a,local,a"}, "stores_differ"),
        ({"store.names": "a,b"}, "default_store_exists"),
        ({"store.default": "remote"}, "default_store_exists"),
    ],
)
def test_keys_that_contradict_each_other(flags: dict[str, str], name: str, tmp_path: Path) -> None:
    (found,) = problems("", tmp_path, flags=flags)
    assert f"(check {name}" in found
    assert any(key in found.partition(":")[0] for key in flags)


@pytest.mark.parametrize("text", ["0.9", "1", "1.", "1.0", ".75"])
def test_shares_are_numbers_as_text_and_in_the_file(text: str, tmp_path: Path) -> None:
    flags = {"pool.high_water": text, "pool.low_water": "0.5"}
    assert load(tmp_path, flags=flags).config.pool.high_water == float(text)


def test_shares_in_the_file_may_be_whole(tmp_path: Path) -> None:
    toml = "[pool]\nhigh_water = 1\nlow_water = 0.75\n"
    pool = load(tmp_path, toml).config.pool
    assert (pool.high_water, pool.low_water) == (1.0, 0.75)
    (found,) = problems("[pool]\nhigh_water = '0.9'\n", tmp_path)
    assert "expected a number, e.g. 0.95, got a text" in found


def test_the_remedy_of_frame_holds_hashes_works(tmp_path: Path) -> None:
    flags = {"server.frame_size_max": "2MiB"}
    (found,) = problems("", tmp_path, flags=flags)
    blocks = found.partition("limits.blocks_per_request to ")[2].partition(" ")[0]
    load(tmp_path, flags={**flags, "limits.blocks_per_request": blocks})
    assert problems(
        "", tmp_path, flags={**flags, "limits.blocks_per_request": str(int(blocks) + 1)}
    )


def test_cross_checks_leave_out_keys_that_are_wrong_already(tmp_path: Path) -> None:
    flags = {"server.frame_size_max": "2MB", "limits.blocks_per_request": "1000000"}
    (found,) = problems("", tmp_path, flags=flags)
    assert found.startswith("server.frame_size_max: ")


def test_no_file_gives_the_defaults(tmp_path: Path) -> None:
    loaded = load_config(None, {}, {}, default_path=tmp_path / "absent.toml")
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}


def test_the_default_file_is_read_when_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text("[pool]\nsize = '2GiB'\n")
    loaded = load_config(None, {}, {}, default_path=path)
    assert loaded.config.pool.size == 2 * GIB
    assert loaded.origins["pool.size"] == f"file {path}:2"


def test_precedence_and_origins(tmp_path: Path) -> None:
    toml = """
[pool]
size = "2GiB"   # replaced by the environment
headroom = "0B"
populate_step = "8MiB"
[server]
allowed_uids = [1000, 1001]
[metrics]
enabled = false
"""
    env = {"KVD_POOL_SIZE": "3GiB", "KVD_POOL_HEADROOM": "1MiB", "KVD_RUNTIME_DIR": "/run/x"}
    flags = {"pool.headroom": "5MiB", "server.oom_score_adj": "-500", "limits.peers": " 3 "}
    loaded = load(tmp_path, toml, env, flags)
    config = loaded.config
    assert config.pool == PoolConfig(size=3 * GIB, headroom=5 * MIB, populate_step=8 * MIB)
    assert config.server.allowed_uids == (1000, 1001)
    assert config.server.runtime_dir == "/run/x"
    assert config.server.oom_score_adj == -500
    assert config.limits.peers == 3
    assert config.metrics.enabled is False
    assert {key: text for key, text in loaded.origins.items() if text != "default"} == {
        "pool.size": "env KVD_POOL_SIZE",
        "pool.headroom": "flag --set pool.headroom",
        "pool.populate_step": f"file {tmp_path}/kvd.toml:5",
        "server.allowed_uids": f"file {tmp_path}/kvd.toml:7",
        "server.runtime_dir": "env KVD_RUNTIME_DIR",
        "server.oom_score_adj": "flag --set server.oom_score_adj",
        "limits.peers": "flag --set limits.peers",
        "metrics.enabled": f"file {tmp_path}/kvd.toml:9",
    }


@pytest.mark.parametrize("text", ["1000,1001", "[1000, 1001]", " 1000 , 1001 "])
def test_a_list_from_the_environment(text: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, env={"KVD_SERVER_ALLOWED_UIDS": text})
    assert loaded.config.server.allowed_uids == (1000, 1001)


def test_an_empty_list_from_the_environment_replaces_the_file(tmp_path: Path) -> None:
    toml = "[server]\nallowed_uids = [1000]\n"
    loaded = load(tmp_path, toml, env={"KVD_SERVER_ALLOWED_UIDS": ""})
    assert loaded.config.server.allowed_uids == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "fe80::1%eth0", "node-1.lan"])
def test_hosts_that_are_allowed(host: str, tmp_path: Path) -> None:
    assert load(tmp_path, flags={"peers.listen_host": host}).config.peers.listen_host == host


@given(st.sampled_from(all_keys()), st.text(max_size=30))
def test_any_text_for_any_key_is_a_value_or_a_report(key: object, text: str) -> None:
    path = getattr(key, "path", "")
    try:
        loaded = load_config(None, {}, {path: text}, default_path=Path("/nonexistent/kvd.toml"))
    except ConfigError as error:
        report = error.problems
    else:
        report = [f"{path}: fine"] if loaded.origins[path] == f"flag --set {path}" else []
    assert report
    assert all(path in problem and problem.isprintable() for problem in report)


def test_describe_shows_every_key_and_its_rows_load_again(tmp_path: Path) -> None:
    flags = {"pool.size": "1536MiB", "server.allowed_uids": "7,8", "server.oom_score_adj": "5"}
    flags["store.names"] = "local,fast"
    loaded = load(tmp_path, flags=flags)
    rows = describe(loaded)
    assert [row.key for row in rows] == [key.path for key in all_keys()]
    by_key = {row.key: row for row in rows}
    assert (by_key["pool.size"].value, by_key["pool.size"].origin) == (
        "1.5GiB",
        "flag --set pool.size",
    )
    assert by_key["release.read_deadline"].reloadable
    assert not by_key["pool.size"].reloadable
    again = load(tmp_path, flags={row.key: row.value for row in rows})
    assert again.config == loaded.config


def test_reload_applies_what_it_may_and_names_the_rest(tmp_path: Path) -> None:
    running = load(tmp_path, flags={"release.read_deadline": "4s"})
    fresh = load(tmp_path, '[pool]\nsize = "2GiB"\n[release]\nread_deadline = "6s"\n')
    reload = plan_reload(running, fresh)
    assert reload.applied == {"release.read_deadline": ("4s", "6s")}
    assert reload.pending_restart == {"pool.size": ("1GiB", "2GiB")}
    assert reload.loaded.config.pool == running.config.pool
    assert reload.loaded.config.release == fresh.config.release
    assert reload.loaded.origins["pool.size"] == "default"
    assert reload.loaded.origins["release.read_deadline"] == f"file {tmp_path}/kvd.toml:4"


def test_reload_without_a_difference_changes_nothing(tmp_path: Path) -> None:
    running = load(tmp_path)
    reload = plan_reload(running, load(tmp_path))
    assert (reload.applied, reload.pending_restart) == ({}, {})
    assert reload.loaded.config == running.config


def test_every_key_is_complete() -> None:
    for key in all_keys():
        assert key.rule, key.path
        assert key.description.endswith("."), key.path
        assert value_of(Config(), key) == key.default
        assert bool(key.at_limit) == (key.section == "limits" or key.path == "pool.block_count_max")
