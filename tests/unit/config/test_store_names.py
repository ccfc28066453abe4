"""Names of stores: which are none, which contradict each other, and where they may come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.test_config_load import load, problems


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("KVD_STORE_NAMES", "", "must be a list of 1 to 16 names, each 1 to 64 letters, digits"),
        ("KVD_STORE_NAMES", "local,", '"local," is not allowed: must be a list of 1 to 16 names'),
        ("KVD_STORE_NAMES", "local,a b", "must be a list of 1 to 16 names"),
        ("KVD_STORE_NAMES", f"local,{'x' * 65}", "must be a list of 1 to 16 names"),
        ("KVD_STORE_NAMES", ",".join(f"s{n}" for n in range(17)), "a list of 1 to 16 names"),
        ("KVD_STORE_DEFAULT", "", "must be 1 to 64 letters, digits and _ . : @ -"),
        ("KVD_STORE_DEFAULT", "lócal", "must be 1 to 64 letters, digits and _ . : @ -"),
    ],
)
def test_names_in_the_environment_that_are_none(
    name: str, text: str, problem: str, tmp_path: Path
) -> None:
    (found,) = problems("", tmp_path, env={name: text})
    assert problem in found
    assert found.endswith(f"(env {name})")


@pytest.mark.parametrize("text", ["fast,local", '["fast", "local"]', " fast , local "])
def test_names_from_the_environment(text: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, env={"KVD_STORE_NAMES": text})
    assert loaded.config.store.names == ("fast", "local")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('names = "local"', 'store.names: expected a list of names, e.g. ["local"], got a text'),
        (
            "names = [1]",
            'store.names: expected a list of names, e.g. ["local"], got a whole number',
        ),
        ("names = []", 'store.names: "" is not allowed: must be a list of 1 to 16 names'),
        ('names = ["local", ""]', "store.names: "),
    ],
)
def test_names_in_the_file_that_are_none(line: str, problem: str, tmp_path: Path) -> None:
    (found,) = problems(f"[store]\n{line}\n", tmp_path)
    assert found.startswith(problem)
    assert found.endswith("(file FILE:2)")


def test_a_default_store_that_is_none_of_the_names_says_which_there_are(tmp_path: Path) -> None:
    toml = '[store]\nnames = ["local", "fast"]\ndefault = "slow"\n'
    assert problems(toml, tmp_path) == [
        'store.names, store.default: store.default is "slow", which is not one of local, fast: '
        "add it, or choose another (check default_store_exists)"
    ]
    config = load(tmp_path, toml.replace("slow", "fast")).config
    assert (config.store.names, config.store.default) == (("local", "fast"), "fast")
