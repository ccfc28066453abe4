"""Rules of faults: which operations they take, and which they cannot."""

from __future__ import annotations

import pytest

from engine_shim.testing import Fail, Late, Lose, OpInfo, Rule, Swap, Twice
from engine_shim.testing_rules import Fault, OpKind


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (Lose(), "copy", "Lose needs host or record"),
        (Lose(), None, "kind is None; Lose needs"),
        (Late(5), "wait", "Late needs host or record"),
        (Twice(), "record", "Twice needs host"),
        (Swap(), "host", "Swap needs copy"),
    ],
)
def test_faults_that_cannot_happen(fault: Fault, kind: OpKind | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(fault, kind=kind)


@pytest.mark.parametrize("probability", [-0.1, 1.1])
def test_probability_that_cannot_be(probability: float) -> None:
    with pytest.raises(ValueError, match=f"probability is {probability}"):
        Rule(Fail(), probability=probability)


def test_rule_needs_all_its_conditions() -> None:
    rule = Rule(Fail(), stream="load", kind="copy", when=lambda op: op.nbytes > 10)
    assert rule.matches(OpInfo("load", "copy", 0, 11))
    assert not rule.matches(OpInfo("save", "copy", 0, 11))
    assert not rule.matches(OpInfo("load", "host", 0, 11))
    assert not rule.matches(OpInfo("load", "copy", 0, 10))
    assert Rule(Fail()).matches(OpInfo("save", "wait", 7))
