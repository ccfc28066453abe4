"""What type checkers and readers are told about the native rows agrees with the module."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from kvd_kernels import _rows, rows

STUB = Path(rows.__file__).with_name("_rows.pyi")


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def stub_members() -> dict[str, set[str]]:
    """Map each class of the stub to its members, and "" to the module's functions and classes."""
    names: dict[str, set[str]] = {"": set()}
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names[""].add(node.name)
        elif isinstance(node, ast.ClassDef):
            names[""].add(node.name)
            members = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            names[node.name] = public(members)
    return names


MEMBERS = stub_members()


def test_the_stub_names_exactly_what_the_module_has() -> None:
    assert MEMBERS[""] == public(dir(_rows))
    for owner in MEMBERS[""] - {"HoleError", "row_kernels"}:
        assert MEMBERS[owner] == public(list(vars(getattr(_rows, owner)))), owner


@pytest.mark.parametrize(
    ("owner", "member"),
    [(owner, member) for owner in MEMBERS if owner for member in sorted(MEMBERS[owner])],
)
def test_every_member_has_a_docstring(owner: str, member: str) -> None:
    assert len(inspect.getdoc(getattr(getattr(_rows, owner), member)) or "") > 20


def test_every_public_name_has_a_docstring() -> None:
    for name in rows.__all__:
        if callable(getattr(rows, name)):
            assert inspect.getdoc(getattr(rows, name)), name


def test_importing_the_module_imports_neither_numpy_nor_torch() -> None:
    script = (
        "import sys, kvd_kernels.rows; "
        "raise SystemExit('numpy' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
