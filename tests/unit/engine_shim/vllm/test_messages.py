"""What two ranks say together."""

from __future__ import annotations

from engine_shim.vllm.messages import Failure, StepReport


def test_nothing_to_say_is_false() -> None:
    assert not StepReport()
    assert StepReport(unsaved={"a"})
    assert StepReport({"a": Failure("code", "why")})


def test_a_row_that_is_missing_on_one_rank_is_missing() -> None:
    one = StepReport({"a": Failure("x", "first", (3, 1)), "b": Failure("y", "why", (7,))}, {"u"})
    other = StepReport({"a": Failure("z", "second", (2, 3)), "c": Failure("w", "", (9,))}, {"v"})
    both = one.with_rank(other)
    assert both.failed == {
        "a": Failure("x", "first", (1, 2, 3)),
        "b": Failure("y", "why", (7,)),
        "c": Failure("w", "", (9,)),
    }
    assert both.unsaved == {"u", "v"}
    assert one.failed["a"].blocks == (3, 1), "the reports themselves are left alone"


def test_order_of_ranks_does_not_change_what_is_void() -> None:
    one = StepReport({"a": Failure("x", "", (1,))})
    other = StepReport({"a": Failure("x", "", (2,))}, {"u"})
    assert one.with_rank(other) == other.with_rank(one)
