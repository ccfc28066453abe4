"""The demo's command line: what is wrong with it is said at once, by the name of the option."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_shim.reference.bytes_tokenizer import encode, long_text, longest_text
from engine_shim.reference.demo import command
from engine_shim.reference.demo.options import LONG_TOKENS, TOKENS, options_of, parser
from engine_shim.reference.demo.run import Demo, DemoOptions

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong command line must never get as far as that."""

    def run(demo: Demo) -> None:
        raise AssertionError(f"{demo} was started")

    monkeypatch.setattr(Demo, "run", run)
    monkeypatch.chdir(tmp_path)


def options(*arguments: str) -> tuple[DemoOptions, str]:
    """What a command line means."""
    return options_of(parser().parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "-1"], "--seed is -1; give 0 to 9223372036854775807"),
        (["--seed", str(2**63)], f"--seed is {2**63}; give 0 to "),
        (["--width", "1000"], "--width is 1000; give 1 to 512 to the demo model"),
        (["--width", "0"], "--width is 0; give 1 to 512 to the demo model"),
        (["--model", "tiny", "--width", "33"], "--width is 33; give 1 to 32 to the tiny model"),
        (["--new", "0"], "--new is 0; give 1 or more"),
        (["--threads", "0"], "--threads is 0; give 1 or more"),
        (["--tokens", "1023"], "--tokens is 1023; give 1024 or more"),
        (["--tokens", "0"], "--tokens is 0; give 1024 or more"),
        (["--tokens", "100000000"], "--tokens is 100000000; give 1024 to "),
        (["--prompt-file", "no/[such]"], "prompt file no/[such] does not exist"),
        (["--out", "/dev/null"], "--out /dev/null cannot be a directory (File exists)"),
        (["--out", "/dev/null/x"], "--out /dev/null/x cannot be a directory (Not a directory)"),
    ],
)
def test_wrong_option_is_one_line_that_names_it(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    said = capsys.readouterr().out
    assert said.startswith(f"failed: {message}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--long", "--tokens", "4096"], "argument --tokens: not allowed with argument --long"),
        (["--tokens", str(TOKENS), "--long"], "argument --long: not allowed with argument"),
        (["--prompt-file", ""], "argument --prompt-file: the path is empty"),
        (["--out="], "argument --out: the path is empty"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        command.main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_to_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert command.main(["--out", "here", "--tokens", "1024"]) == 2
    assert "--out here cannot be written to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ([], TOKENS),
        (["--long"], LONG_TOKENS),
        (["--tokens", "1024"], 1024),
        (["--tokens", str(longest_text())], longest_text()),
    ],
)
def test_length_of_the_built_in_text(arguments: list[str], count: int) -> None:
    made, said = options(*arguments)
    assert list(made.tokens) == encode(long_text(count))
    assert said == ""


@pytest.mark.parametrize(
    ("size", "arguments", "used", "said"),
    [
        (2000, [], 2000, ""),
        (2000, ["--tokens", "2000"], 2000, ""),
        (2000, ["--tokens", "1500"], 1500, "F has 2000 tokens: the first 1500 are used"),
        (9, ["--tokens", "1024"], 9, "F has 9 tokens, fewer than 1024: all of them are used"),
        (40000, ["--long"], 32768, "F has 40000 tokens: the first 32768 are used"),
        (9, ["--long"], 9, "F has 9 tokens, fewer than 32768: all of them are used"),
    ],
)
def test_a_file_is_cut_and_that_is_said(
    tmp_path: Path, size: int, arguments: list[str], used: int, said: str
) -> None:
    text = long_text(size)
    (tmp_path / "F").write_text(text)
    made, line = options("--prompt-file", "F", *arguments)
    assert list(made.tokens) == encode(text)[:used]
    assert line == said


def test_help_has_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    for default in (TOKENS, "a built-in one", 64, 4, "demo", 0, 1, "demo-out"):
        assert f"(default: {default}" in words
