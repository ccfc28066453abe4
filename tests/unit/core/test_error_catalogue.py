"""The error catalogue: every code reads well, is used, and is raised with all that it names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from string import Formatter

import pytest

from kvd.core.errors import (
    CATALOGUE,
    ConfigError,
    ErrorSpec,
    InvariantError,
    KvdError,
    LocalError,
    PeerError,
    Retry,
)

ROOT = Path(__file__).parents[3]
SOURCES = ("kvd", "engine_shim")
CATALOGUE_FILE = ROOT / "kvd" / "core" / "catalogue.py"

NOT_RAISED_YET: frozenset[str] = frozenset()
"""Codes that no source names yet; each is taken out of here by the change that raises it."""

RAISERS = ("KvdError", "LocalError", "PeerError")

SPECS = sorted(CATALOGUE.values(), key=lambda spec: spec.code)


def _placeholders(spec: ErrorSpec) -> set[str]:
    fields = [*Formatter().parse(spec.what), *Formatter().parse(spec.remedy)]
    return {name for _, name, _, _ in fields if name}


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for root in SOURCES:
        for path in sorted((ROOT / root).rglob("*.py")):
            if path != CATALOGUE_FILE:
                yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_unknown_code_is_a_bug() -> None:
    with pytest.raises(KeyError, match="no_such_code"):
        LocalError("no_such_code")


def test_value_that_was_not_given_shows_as_a_question_mark() -> None:
    assert LocalError("slot_unknown", slot=3).what == ("slot 3 is outside the ? slots of member ?.")


def test_value_with_braces_is_not_filled_in_again() -> None:
    error = LocalError("block_poisoned", block=1, detail="{block} {0} {detail!r}")
    assert error.what == "block 1 is poisoned: {block} {0} {detail!r}."


def test_text_is_code_sentence_and_remedy() -> None:
    error = PeerError("transfer_unknown", transfer="t1")
    assert str(error) == (
        "transfer_unknown: transfer t1 is not known. It ended, or was never expected here."
    )
    assert error.context == {"transfer": "t1"}
    assert isinstance(error, KvdError)
    assert not isinstance(error, LocalError)


def test_config_error_names_every_problem() -> None:
    error = ConfigError(["pool.size: too small", "limits.engines: no number"])
    assert error.code == "config_invalid"
    assert error.problems == ["pool.size: too small", "limits.engines: no number"]
    assert "pool.size: too small\nlimits.engines: no number" in str(error)


def test_invariant_error_is_no_refusal() -> None:
    error = InvariantError(["a block is free twice", "a hold twice"], story="...")
    assert not isinstance(error, KvdError)
    assert str(error) == "a block is free twice; a hold twice"
    assert error.story == "..."


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.code)
def test_row_reads_well(spec: ErrorSpec) -> None:
    error = KvdError(spec.code, **dict.fromkeys(_placeholders(spec), "X"))
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", spec.code)
    assert HTTPStatus(spec.status) >= HTTPStatus.BAD_REQUEST
    assert "{" not in str(error)
    assert "?" not in error.what
    assert error.what.endswith(".")
    assert not error.what.endswith("..")
    assert spec.remedy == "{fix}" or spec.remedy.endswith((".", "?"))
    assert "\n" not in spec.what + spec.remedy


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.code)
def test_status_fits_who_may_try_again(spec: ErrorSpec) -> None:
    """What may succeed the same way later is no 400; what never will is no 503."""
    if spec.retry is Retry.SAME:
        assert spec.status not in (400, 403, 404, 410, 413)
    if spec.retry is Retry.NEVER:
        assert spec.status != 503 or spec.code == "slot_quarantined"


def test_keys_are_the_codes() -> None:
    assert [(key, spec.code) for key, spec in CATALOGUE.items() if key != spec.code] == []
    rows = re.findall(r'ErrorSpec\(\s*"([a-z_]+)"', CATALOGUE_FILE.read_text(encoding="utf-8"))
    assert len(rows) == len(set(rows)), "a code twice"
    assert set(rows) == set(CATALOGUE)


def test_every_code_is_raised_somewhere() -> None:
    named = {
        node.value
        for _, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert CATALOGUE.keys() - named == NOT_RAISED_YET


def test_every_error_is_raised_with_all_that_its_text_names() -> None:
    """An error that shows a question mark, or is given what nobody reads, is a mistake."""
    wrong: list[str] = []
    for path, tree in _trees():
        for call in _raisers(tree):
            code = ast.literal_eval(call.args[0])
            where = f"{path.relative_to(ROOT)}:{call.lineno} {code}"
            if code not in CATALOGUE:
                wrong.append(f"{where} is not in the catalogue")
                continue
            given = {keyword.arg for keyword in call.keywords}
            needed = _placeholders(CATALOGUE[code])
            if None not in given and given != needed:
                wrong.append(f"{where} is given {given}, names {needed}")
    assert wrong == []


def _raisers(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in RAISERS:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node
