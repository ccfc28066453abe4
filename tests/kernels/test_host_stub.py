"""What type checkers and readers are told about the native module agrees with the module."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from kvd_kernels import _host, host

STUB = Path(host.__file__).with_name("_host.pyi")


def stub_names(stub: Path = STUB) -> dict[str, set[str]]:
    """Map each class of the stub to its members, and "" to the module's functions and classes."""
    names: dict[str, set[str]] = {"": set()}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names[""].add(node.name)
        elif isinstance(node, ast.ClassDef):
            names[""].add(node.name)
            members = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            names[node.name] = public(members)
    return names


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_the_stub_names_exactly_what_the_module_has() -> None:
    names = stub_names()
    assert names.pop("") == public(dir(_host))
    for owner, members in names.items():
        assert members == public(dir(getattr(_host, owner))), owner


def described() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name in host.__all__:
        member = getattr(host, name)
        if callable(member):
            found.append((name, member))
        if inspect.isclass(member) and member.__module__ != "typing":
            found += [(f"{name}.{m}", getattr(member, m)) for m in public(list(vars(member)))]
    for owner in ("BlockIndex", "CopyQueue", "Mapping", "GateWaiter"):
        found += [(f"{owner}.{m}", getattr(_host, owner).__dict__[m]) for m in stub_names()[owner]]
    return sorted(found, key=lambda pair: pair[0])  # sets come in any order


@pytest.mark.parametrize(("name", "member"), described())
def test_every_public_name_has_a_docstring(name: str, member: object) -> None:
    assert len(inspect.getdoc(member) or "") > 20, name
