"""What bench.sparse runs on: recorded traces, and the policies that count what they miss."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench import sparse_record
from bench.sparse_baselines import Baselines
from bench.sparse_misses import WIDTH, widened
from bench.sparse_record import Recording, save_trace
from bench.sparse_traces import Ints, RecordedTrace, load_trace

SMALL = Recording(prompt=40, new=6, topk=16)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["trace.json"], "ends in .npz"),
        (["trace.npz", "--layer", "1"], r"--layer is 1; give one of \(0, 2\)"),
        (["trace.npz", "--new", "0"], "--new is 0; give 1 or more"),
    ],
)
def test_a_wrong_option_is_named(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sparse_record.main(options)
    assert re.search(expected, capsys.readouterr().err)


def test_a_trace_outside_its_context_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_trace(path, RecordedTrace(8, [[np.array([3, 8], np.int32)]]))
    with pytest.raises(ValueError, match="position outside its context of 8"):
        load_trace(path)


def test_a_recording_has_a_selection_for_each_new_token_and_layer() -> None:
    recorded = SMALL.run()
    assert list(recorded) == [0, 2]
    for trace in recorded.values():
        assert [len(step) for step in trace.steps] == [1] * SMALL.new
        for number, (row,) in enumerate(trace.steps):
            assert len(row) == SMALL.topk
            assert np.all(np.diff(row) > 0)
            # A step's own token is the last one that it may select.
            assert row[-1] <= SMALL.prompt - 1 + number


def test_a_recording_is_the_same_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    options = ["--layer", "2", "--tokens", "40", "--new", "6", "--topk", "16"]
    assert sparse_record.main([str(path), *options]) == 0
    read, made = load_trace(path), SMALL.run()[2]
    assert read.context == made.context
    assert as_lists(read.steps) == as_lists(made.steps)


def test_padding_and_uneven_steps_survive_a_file(tmp_path: Path) -> None:
    rows = [np.array(row, np.int32) for row in ([1, 2, 3], [4], [5, 6])]
    save_trace(tmp_path / "trace.npz", RecordedTrace(9, [rows[:1], rows[1:]]))
    read = load_trace(tmp_path / "trace.npz")
    # A query that a step does not have selects nothing.
    assert as_lists(read.steps) == [[[1, 2, 3], []], [[4], [5, 6]]]


def test_widened_steps_have_every_query_once_and_in_order() -> None:
    steps = [[np.array([number], np.int32)] for number in range(2 * WIDTH + 1)]
    wide = widened(steps)
    assert [len(step) for step in wide] == [WIDTH, WIDTH, 1]
    assert [int(row[0]) for step in wide for row in step] == list(range(2 * WIDTH + 1))


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Baselines:
    return Baselines(tmp_path_factory.mktemp("baselines"))


def test_lru_misses_what_a_dumb_one_misses(baselines: Baselines) -> None:
    rng, lru, dumb = random.Random(7), baselines.lru(12, 24), DumbLru(12)
    for _ in range(2000):
        # One at a time: of those that a step uses together, either may go first.
        token = rng.randrange(24)
        assert lru.misses(np.array([token], np.int32)) == dumb.misses(token)


def as_lists(steps: Sequence[Sequence[Ints]]) -> list[list[list[int]]]:
    return [[row.tolist() for row in step] for step in steps]


class DumbLru:
    """A list in the order of use."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held: list[int] = []

    def misses(self, token: int) -> int:
        held = token in self._held
        self._held = [*(other for other in self._held if other != token), token][-self._slots :]
        return int(not held)
