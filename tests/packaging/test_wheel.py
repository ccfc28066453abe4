"""What the wheel holds: three packages, one native module, two scripts, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "kvd": ROOT / "kvd",
    "engine_shim": ROOT / "engine_shim",
    "kvd_kernels": ROOT / "kernels" / "kvd_kernels",
}

pytestmark = pytest.mark.timeout(900)  # the first to need the wheel builds it


@pytest.fixture
def opened(wheel: Path) -> Iterator[ZipFile]:
    with ZipFile(wheel) as file:
        yield file


def info(opened: ZipFile, name: str) -> str:
    """Return a file of the wheel's dist-info."""
    (path,) = (path for path in opened.namelist() if path.endswith(f".dist-info/{name}"))
    return opened.read(path).decode()


def metadata(opened: ZipFile) -> Message:
    """Return the wheel's metadata."""
    return Parser().parsestr(info(opened, "METADATA"))


def sources() -> dict[str, Path]:
    """Return what the checkout has for the packages, by its name in the wheel."""
    return {
        f"{package}/{path.relative_to(top)}": path
        for package, top in PACKAGES.items()
        for path in top.rglob("*")
        if path.suffix in (".py", ".pyi", ".typed") or path.name == "py.typed"
    }


def test_nothing_else_is_in_it(opened: ZipFile) -> None:
    names = opened.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == set(PACKAGES)
    expected = (".py", ".pyi", ".so", "py.typed")
    odd = [name for name in names if ".dist-info/" not in name and not name.endswith(expected)]
    assert not odd
    assert not [name for name in names if "/test_" in name or "conftest" in name]


def test_every_source_is_in_it_as_it_is(opened: ZipFile) -> None:
    held = {name for name in opened.namelist() if name.endswith((".py", ".pyi", "py.typed"))}
    assert held == set(sources())
    stale = [name for name, path in sources().items() if opened.read(name) != path.read_bytes()]
    assert not stale


def test_native_modules(opened: ZipFile, wheel: Path) -> None:
    native = [name.split(".")[0] for name in opened.namelist() if name.endswith(".so")]
    assert sorted(native) == ["kvd_kernels/_host", "kvd_kernels/_residency", "kvd_kernels/_rows"]
    assert "any" not in wheel.stem.split("-")[-1]


def test_scripts(opened: ZipFile) -> None:
    parsed = ConfigParser()
    parsed.read_string(info(opened, "entry_points.txt"))
    assert dict(parsed["console_scripts"]) == {
        "kvd": "kvd.cli.daemon:main",
        "kvctl": "kvd.cli.kvctl:main",
    }


def test_engine_is_an_extra(opened: ZipFile) -> None:
    needs = metadata(opened).get_all("Requires-Dist") or []
    always = {need.split(">")[0] for need in needs if "extra ==" not in need}
    assert not always & {"torch", "numpy", "vllm"}
    assert any(need.startswith("torch") and "engine" in need for need in needs)


def test_metadata_for_people(opened: ZipFile) -> None:
    said = metadata(opened)
    assert said["Name"] == "kvd"
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    assert info(opened, "licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")
