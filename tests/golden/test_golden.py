"""Scripts of what happens to one slot, each named by the rule or the failure that it shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.exhaustive.classes import ClassEdge
from tests.exhaustive.worlds import mapped
from tests.golden.language import ScriptError
from tests.golden.runner import parse, rewritten, run

HERE = Path(__file__).parent
SCRIPTS = sorted(HERE.glob("*.txt"))
REWRITE = "KVD_TEST_REWRITE"

NOT_SHOWN: frozenset[str] = frozenset()
"""Edges that no script needs to show; each needs a reason here."""


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("explode", "unknown word 'explode'"),
        ("save_ended s maybe", "KeyError('maybe')"),
        ("save_ended", "cannot read 'save_ended'"),
        ("written loads=a", "unknown ['loads']"),
        ("answered READ a perhaps", "cannot read"),
        ("rules speed=9", "unknown rules ['speed']"),
        ("announced dancing", "cannot announce ['dancing']"),
    ],
)
def test_bad_line_is_named_with_its_block(line: str, what: str) -> None:
    with pytest.raises(ScriptError) as caught:
        run(f"acquired\n----\n-\n@0\n\n{line}\n----\n-\n")
    assert str(caught.value).startswith("block at line 6: ")
    assert what in str(caught.value)


def test_block_without_an_outcome_is_refused() -> None:
    with pytest.raises(ScriptError, match="line 3: a block without ----"):
        parse("# a remark\n\nacquired\n")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if os.environ.get(REWRITE) == "1":
        path.write_text(rewritten(text), encoding="utf-8")
        return
    for block, got in run(text)[0]:
        said = "\n".join(block.said)
        wanted = "\n".join(block.expected)
        assert "\n".join(got) == wanted, f"{path.name}, block at line {block.line_no}:\n{said}"
    assert rewritten(text) == text, f"{path.name} is not laid out as {REWRITE}=1 lays it out"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_has_one_outcome(path: Path) -> None:
    """R8: the same events at the same times give the same effects and states."""
    text = path.read_text(encoding="utf-8")
    assert run(text) == run(text)


@pytest.mark.slow
def test_every_edge_is_shown_by_a_script() -> None:
    """Coverage by edge: whatever can happen in some state is to be read in some script."""
    shown: set[ClassEdge] = set()
    for path in SCRIPTS:
        shown |= run(path.read_text(encoding="utf-8"))[1]
    missing = {str(edge) for edge in mapped()[1] - shown}
    assert sorted(missing - NOT_SHOWN) == []
    assert missing == NOT_SHOWN, "NOT_SHOWN names edges that are shown or do not exist"
