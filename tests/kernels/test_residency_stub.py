"""What type checkers and readers are told about the native module agrees with the module."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from kvd_kernels import _residency, residency
from tests.kernels.test_host_stub import public, stub_names

STUB = Path(residency.__file__).with_name("_residency.pyi")


def test_the_stub_names_exactly_what_the_module_has() -> None:
    names = stub_names(STUB)
    assert names.pop("") == public(dir(_residency))
    for owner, members in names.items():
        assert members == public(dir(getattr(_residency, owner))), owner


@pytest.mark.parametrize(
    ("owner", "member"),
    [(owner, it) for owner in ("HotStep", "HotTables") for it in sorted(stub_names(STUB)[owner])],
)
def test_every_member_has_a_docstring(owner: str, member: str) -> None:
    described = getattr(_residency, owner).__dict__[member]
    assert len(inspect.getdoc(described) or "") > 20
