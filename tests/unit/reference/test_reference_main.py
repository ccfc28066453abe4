"""`python -m engine_shim.reference`."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_shim.reference.__main__ import main

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "error: prompt is empty; give at least one character"),
        (["--prompt-file", "/nonexistent/p.txt"], "error: prompt file /nonexistent/p.txt does not"),
        (["--prompt-tokens", "0"], "error: num_tokens is 0"),
        (["--new-tokens", "0"], "error: new_tokens is 0"),
        (["--chunk", "0"], "error: chunk is 0"),
        (["--width", "0"], "error: width is 0"),
        (["--threads", "0"], "error: num_threads is 0"),
        (["--seed", "-1"], "error: seed is -1"),
        (
            ["--prompt-tokens", "1001"],
            "error: prompt and new_tokens are 1065 tokens together; give 1024",
        ),
    ],
)
def test_wrong_argument_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "tiny", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "--prompt-file" in capsys.readouterr().out


def test_it_generates_and_says_how_fast(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the quick brown fox")
    arguments = ["--model", "tiny", "--new-tokens", "5"]
    assert main([*arguments, "--prompt-file", str(prompt)]) == 0
    first = capsys.readouterr().out
    assert "prefill   19 tokens," in first
    assert "decode    5 tokens," in first
    assert main([*arguments, "--prompt", "the quick brown fox", "--width", "3"]) == 0
    second = capsys.readouterr().out
    assert second.splitlines()[0] == first.splitlines()[0], "the text does not depend on width"
    assert "drafts    " in second


def test_one_token_needs_no_decode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny", "--prompt", "x", "--new-tokens", "1"]) == 0
    assert "decode" not in capsys.readouterr().out
