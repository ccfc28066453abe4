"""The command line of the demo in vLLM, and its verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_shim.vllm.demo import command
from engine_shim.vllm.demo.options import TOKENS, options_of, parser
from engine_shim.vllm.demo.run import BLOCK_TOKENS, Demo, DemoOptions, DemoResult
from engine_shim.vllm.demo.server import Completion, ServerFailed

COLD = Completion((1, 2), 3.0, 4.0, TOKENS, 0, "length")
HIT = Completion((1, 2), 0.3, 0.4, TOKENS, TOKENS - BLOCK_TOKENS, "length")
OTHER = Completion((1, 3), 3.0, 4.0, TOKENS, 0, "length")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of its own, and nothing that starts."""
    monkeypatch.chdir(tmp_path)
    finds(monkeypatch, None)


def finds(monkeypatch: pytest.MonkeyPatch, result: DemoResult | None) -> None:
    """Have the demo find something without running; None: it must not come so far."""

    def run(demo: Demo) -> DemoResult:
        assert result is not None, "the demo was started"
        return result

    monkeypatch.setattr(Demo, "run", run)


def options(*arguments: str) -> DemoOptions:
    """What a command line means."""
    return options_of(parser().parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1023"], "--tokens is 1023; give 1024 to "),
        (["--tokens", "40000"], "--tokens is 40000; give 1024 to "),
        (["--new", "0"], "--new is 0; give 1 to 256"),
        (["--buffers", "0"], "--buffers is 0; give 1 to 8"),
        (["--seed", "-1"], "--seed is -1; give 0 to "),
        (["--threads", "0"], "--threads is 0; give 1 to "),
        (["--python", "no-such"], "--python no-such is no program; give an interpreter"),
        (["--out", "/dev/null"], "--out /dev/null cannot be a directory"),
    ],
)
def test_wrong_option_is_one_line_that_names_it(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    said = capsys.readouterr().out
    assert said.startswith(f"failed: {message}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("tokens", [1024, 2048, TOKENS, 32000])
def test_text_fits_only_where_buffers_are_shared(tokens: int) -> None:
    made = options("--tokens", str(tokens))
    assert len(made.text) == tokens
    block = made.stock_bytes // (made.num_blocks + 4)
    assert made.device_bytes < made.num_blocks * block < made.stock_bytes
    # Twelve layers have five buffers.
    assert made.device_bytes * 12 // 5 > (made.num_blocks + 2) * block
    assert made.pool_mib << 20 > 2 * made.num_blocks * block


@pytest.mark.parametrize(
    ("result", "equal", "code"),
    [
        (DemoResult(COLD, HIT, COLD), True, 0),
        (DemoResult(COLD, HIT, OTHER), False, 1),
        (DemoResult(OTHER, HIT, OTHER), False, 1),
        (DemoResult(COLD, COLD, COLD), True, 1),
        (DemoResult(HIT, HIT, COLD), True, 1),
    ],
)
def test_it_fails_when_a_token_differs_or_nothing_was_found(
    result: DemoResult,
    equal: bool,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result.engine["offload"] = "rolling: 12 layers, 69 blocks instead of 28 (bounded by memory)"
    finds(monkeypatch, result)
    assert command.main([]) == code
    document = json.loads(Path("demo-out/vllm.json").read_text(encoding="utf-8"))
    assert next(iter(document)) == "tokens_equal"
    assert document["tokens_equal"] is equal
    assert (document["blocks_rolling"], document["blocks_stock"]) == (69, 28)
    assert ("failed:" in capsys.readouterr().out) == bool(code)


def test_server_that_fails_is_told_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(demo: Demo) -> DemoResult:
        raise ServerFailed("server first ended with code 1 at its start\nlast [words]")

    monkeypatch.setattr(Demo, "run", run)
    assert command.main([]) == 1
    assert "server first ended with code 1 at its start\nlast [words]" in capsys.readouterr().out
