"""What may import what beyond the contracts of pyproject.toml, and modules nobody needs."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

from tests.tidy.sources import (
    ROOT,
    SHIPPED,
    at,
    files,
    imports_of,
    module_of,
    python_files,
    report,
    text_of,
    tree_of,
)

HOST: Final = "kvd_kernels.host"
VLLM: Final = "vllm"
TRITON: Final = "triton"
WITH_VLLM: Final = frozenset({"tokenizers", "transformers"})
"""What vLLM brings with it."""

THIRD_PARTY: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "kvd.core": frozenset(),
        "kvd.wire": frozenset({"msgspec"}),
        "kvd.plan": frozenset({"msgspec"}),
        "kvd.config": frozenset({"pydantic"}),
        "kvd.memory": frozenset({HOST, "msgspec"}),  # its record is read by later versions
        "kvd.store": frozenset({HOST}),
        "kvd.transfer": frozenset({HOST}),
        "kvd.server": frozenset(
            {HOST, "aiohttp", "prometheus_client", "pydantic", "structlog", "uvloop", "zmq"}
        ),
        "kvd.cli": frozenset({"pydantic", "rich", "typer", "uvloop"}),
        "kvd": frozenset(),
        "engine_shim.reference": frozenset({HOST, "msgspec", "torch", "zmq"}),
        "engine_shim.reference.demo": frozenset({HOST, "msgspec", "rich", "torch", "zmq"}),
        "engine_shim.vllm": frozenset({"torch", VLLM}),
        "engine_shim.vllm.demo": frozenset({"torch", *WITH_VLLM}),
        "engine_shim": frozenset({HOST, "msgspec", "zmq"}),
        "engine_shim.hot_places": frozenset({"torch"}),
        "engine_shim.hot_steps": frozenset({"numpy"}),
        "engine_shim.sparse_ops": frozenset({"numpy"}),
        "kvd_kernels": frozenset(),
        "kvd_kernels.residency_reference": frozenset({"numpy"}),
        "kvd_kernels.rows_reference": frozenset({"numpy"}),
        "kvd_kernels.triton_ops": frozenset({"torch", TRITON}),
        "bench.vllm_engine": frozenset({"torch", VLLM, *WITH_VLLM}),
        "bench": frozenset({HOST, "msgspec", "numpy", "rich", "torch", "uvloop", "zmq"}),
    }
)
"""What each part may import beside the standard library and this project; the longest name wins.

`kvd_kernels.host` counts as third-party: whoever copies or maps memory may have it, nobody else.
Only the reference engine and the part for vLLM have torch, so that the shim serves any engine;
kernels in Triton are launched on its tensors.
"""

CORE_STANDARD: Final = frozenset(
    {"__future__", "array", "collections", "dataclasses", "enum", "re", "types", "typing"}
)
"""All of the standard library that the core may have: nothing there can read, wait or be random."""

OURS: Final = frozenset({"kvd", "engine_shim", "kvd_kernels", "bench"})
TYPING_ONLY: Final = frozenset({"typing_extensions"})
NOT_DECLARED: Final = frozenset({HOST, VLLM, *WITH_VLLM, TRITON, *TYPING_ONLY})


def part_of(module: str) -> str:
    """Return the part of `THIRD_PARTY` that a module belongs to."""
    parts = [name for name in THIRD_PARTY if module == name or module.startswith(f"{name}.")]
    return max(parts, key=len)


def package_of(name: str) -> str | None:
    """Return what an imported name counts as; None for the standard library and this project."""
    if name == HOST or name.startswith(f"{HOST}."):
        return HOST
    top = name.split(".", maxsplit=1)[0]
    return None if top in sys.stdlib_module_names or top in OURS else top


def foreign_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each import of a file that its part may not have, and the line."""
    module = module_of(path)
    part = part_of(module)
    for name, line in imports_of(tree_of(path)):
        package = package_of(name)
        if package is None or package in TYPING_ONLY or package in THIRD_PARTY[part]:
            continue
        if package == HOST and module.startswith("kvd_kernels"):
            continue
        yield package, line


def test_third_party() -> None:
    found = {
        f"{at(path, line)} imports {package}: not allowed in {part_of(module_of(path))}"
        for path in python_files(*SHIPPED, "bench")
        for package, line in foreign_imports(path)
    }
    assert not found, report(found)


def test_core_has_nothing_that_touches_the_world() -> None:
    found = {
        f"{at(path, line)} imports {name}"
        for path in python_files("kvd/core")
        for name, line in imports_of(tree_of(path))
        if name.split(".")[0] not in CORE_STANDARD | {"kvd"}
    }
    assert not found, report(found)


def test_dependencies_are_declared() -> None:
    """What the daemon imports is a dependency of the wheel; what the engine needs is an extra.

    vLLM is neither: it loads the shim, so it is there before, in the version that its user chose.
    Nor is Triton, which comes with the torch of a device, or as triton-ascend.
    """
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    extras = project["optional-dependencies"]["engine"]
    declared = {
        re.split(r"[<>=~! ]", line)[0].lower() for line in [*project["dependencies"], *extras]
    }
    distribution = {"zmq": "pyzmq", "prometheus_client": "prometheus-client"}
    imported = {
        package
        for path in python_files(*SHIPPED)
        for name, _ in imports_of(tree_of(path))
        if (package := package_of(name)) is not None and package not in NOT_DECLARED
    }
    missing = {distribution.get(package, package) for package in imported} - declared
    assert not missing
    unused = declared - {distribution.get(package, package) for package in imported} - {"numpy"}
    assert not unused, f"declared but imported nowhere: {sorted(unused)}"


def test_nothing_imports_tests() -> None:
    found = [
        at(path, line)
        for path in python_files(*SHIPPED, "bench", ".ci")
        for name, line in imports_of(tree_of(path))
        if name.split(".")[0] in ("tests", "pytest", "hypothesis")
    ]
    assert not found, report(found)


def test_kernels_is_a_plain_folder() -> None:
    """`kernels` is a public distribution too: a package of that name here would hide it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_names_of_test_files_are_unique() -> None:
    """pytest names a file by its base name where directories are no packages."""
    names = Counter(path.name for path in python_files("tests") if path.name.startswith("test_"))
    twice = sorted(name for name, count in names.items() if count > 1)
    assert not twice


def entry_points() -> set[str]:
    """Return the modules that something outside Python starts."""
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    scripts = {target.split(":")[0] for group in groups for target in group.values()}
    started = {
        name
        for path in files(*SHIPPED, "bench", "tests", ".ci", "docs", "systemd")
        if path.suffix in (".py", ".md", ".service", "")
        for name in re.findall(r"-m\W+([a-z_]+(?:\.[a-z_]+)+)", text_of(path))
    }
    by_hand = re.findall(r"-m ([a-z_]+(?:\.[a-z_]+)*)", text_of(ROOT / "Makefile"))
    return scripts | started | set(by_hand)


def test_no_module_is_dead() -> None:
    """Each module is imported by another, or is started by its name.

    What only tests import is dead too, but for what is meant for them.
    """
    modules = {module_of(path): path for path in python_files(*SHIPPED, "bench")}
    used = {
        name
        for module, path in modules.items()
        for name, _ in imports_of(tree_of(path))
        if name != module
    }
    alive = used | entry_points() | MEANT_FOR_OTHERS
    dead = [
        at(path)
        for module, path in modules.items()
        if module not in alive
        and path.name not in ("__init__.py", "__main__.py")
        and not (path.parent == ROOT / "bench" and "__main__" in text_of(path))
    ]
    assert not dead, report(dead)


MEANT_FOR_OTHERS: Final = frozenset(
    {
        "engine_shim.testing",
        "kvd_kernels.reference",
        "kvd_kernels.residency_reference",
        "kvd_kernels.rows_reference",
        "kvd_kernels.triton_ops.residency",
        "kvd_kernels.triton_ops.rows",
    }
)
"""Modules that engines and their tests import: faults on command, what kernels mean, and those for
devices, which no engine here has."""


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("kvd.core.slot", "kvd.core"),
        ("kvd.__main__", "kvd"),
        ("engine_shim.reference.model", "engine_shim.reference"),
        ("engine_shim.hot", "engine_shim"),
        ("engine_shim.vllm.plugin", "engine_shim.vllm"),
        ("kvd_kernels.host", "kvd_kernels"),
        ("kvd_kernels.triton_ops.rows", "kvd_kernels.triton_ops"),
    ],
)
def test_part_of(module: str, part: str) -> None:
    assert part_of(module) == part


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("os.path", None),
        ("kvd.core.ids", None),
        ("kvd_kernels.reference", None),
        ("kvd_kernels.host.Mapping", HOST),
        ("torch.nn", "torch"),
    ],
)
def test_package_of(name: str, package: str | None) -> None:
    assert package_of(name) == package
