"""Ctrl-C at the demo: once it is raised, and never while things are in hand."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from engine_shim.reference.demo import command, interrupts
from engine_shim.reference.demo.interrupts import Interrupts
from engine_shim.reference.demo.run import Demo

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def handler() -> Iterator[object]:
    """What handles SIGINT outside; it does again after the test."""
    before = signal.getsignal(signal.SIGINT)
    yield before
    signal.signal(signal.SIGINT, before)


def press(times: int = 1) -> None:
    """Ctrl-C."""
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def test_what_follows_the_first_is_ignored_and_stays_so() -> None:
    def work() -> None:
        with Interrupts():
            try:
                press()
            finally:
                press(3)

    with pytest.raises(KeyboardInterrupt):
        work()
    press(3)


def test_the_handler_from_before_is_back(handler: object) -> None:
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != handler
    assert signal.getsignal(signal.SIGINT) == handler
    with pytest.raises(RuntimeError), Interrupts():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) == handler


def test_what_is_held_is_done_to_its_end() -> None:
    done = []

    def work() -> None:
        with Interrupts() as interrupts:
            with interrupts.held():
                with interrupts.held():
                    press(2)
                    done.append("inner")
                done.append("outer")
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]


def test_one_that_was_lost_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.0)
    with Interrupts():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                press()


def test_the_demo_says_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    monkeypatch.setattr(Demo, "run", lambda demo: press())
    arguments = ["--model", "tiny", "--tokens", "1024", "--out", str(tmp_path)]
    assert command.main(arguments) == interrupts.INTERRUPTED
    assert capsys.readouterr().err == "demo: interrupted\n"
