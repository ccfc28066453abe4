"""The documents that are made from the models have not drifted from them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.config.checks import cross_check
from kvd.config.keys import all_keys
from kvd.config.load import load_config
from kvd.config.model import Config
from kvd.config.template import config_template, limits_document, main

ROOT = Path(__file__).parents[3]


def uncommented() -> str:
    """Return the template with every setting switched on."""
    return re.sub(r"^#(?=[a-z_]+ = )", "", config_template(), flags=re.MULTILINE)


def test_etc_kvd_toml_is_what_the_models_say() -> None:
    assert (ROOT / "etc/kvd.toml").read_text() == config_template(), (
        "run: python -m kvd.config.template > etc/kvd.toml"
    )


def test_docs_limits_is_what_the_models_say() -> None:
    assert (ROOT / "docs/limits.md").read_text() == limits_document(), (
        "run: python -m kvd.config.template --limits > docs/limits.md"
    )


def test_the_template_as_it_is_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text(config_template())
    loaded = load_config(path, {}, {})
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}


def test_the_template_uncommented_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text(uncommented())
    loaded = load_config(path, {}, {})
    assert loaded.config == Config()
    lines = uncommented().splitlines()
    for key, origin in loaded.origins.items():
        number = int(origin.removeprefix(f"file {path}:"))
        assert lines[number - 1].startswith(key.partition(".")[2] + " = ")


def test_the_template_has_every_key_once_and_fits_the_page() -> None:
    text = config_template()
    assert len(re.findall(r"^#[a-z_]+ = ", text, flags=re.MULTILINE)) == len(all_keys())
    assert max(len(line) for line in text.splitlines()) <= 100


def test_every_limit_is_documented() -> None:
    document = limits_document()
    for key in all_keys():
        assert (f"| `{key.path}` |" in document) == (
            key.section == "limits"
            or key.path in ("server.frame_size_max", "pool.block_count_max", "regions.size_max")
        )


def test_defaults_pass_their_own_cross_checks() -> None:
    assert cross_check(Config(), set()) == []


@pytest.mark.parametrize(
    ("arguments", "start"), [([], "# Configuration of kvd"), (["--limits"], "# Limits")]
)
def test_the_command_prints_them(
    arguments: list[str], start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(start)


def test_importing_the_configuration_pulls_in_nothing_heavy() -> None:
    code = (
        "import sys, kvd.config.load; "
        "print(*sorted({name.split('.')[0] for name in sys.modules} & "
        "{'aiohttp', 'asyncio', 'kvd_kernels', 'numpy', 'rich', 'torch', 'typer', 'zmq'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
