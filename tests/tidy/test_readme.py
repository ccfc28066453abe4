"""What the texts for people name exists: targets, commands, modules, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from kvd.cli import daemon, kvctl
from tests.tidy.sources import ROOT, at, files, report, text_of

TEXTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *(path for path in files("docs") if path.suffix == ".md"),
]

_CODE = re.compile(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def code_of(text: str) -> Iterator[str]:
    """Yield each line of code in a Markdown text, a `$` before it removed."""
    for block, span in _CODE.findall(text):
        for line in (block or span).splitlines():
            yield line.strip().removeprefix("$ ")


@cache
def make_targets() -> frozenset[str]:
    """Return the targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z0-9-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))


@cache
def kvctl_commands() -> frozenset[str]:
    """Return the subcommands of kvctl."""
    return frozenset(getattr(get_command(kvctl.app), "commands", {}))


def unknown_words(line: str) -> Iterator[str]:
    """Yield what a line of code names and the project does not have."""
    for words in re.split(r"&&|\|\||[|;]", line):
        said = [word for word in _words(words) if "=" not in word.split("/")[0]]
        if said[:1] == ["make"]:
            yield from (f"make {word}" for word in said[1:] if not _is_target(word))
        elif said[:1] == ["kvctl"] and len(said) > 1 and re.fullmatch(r"[a-z]+", said[1]):
            if said[1] not in kvctl_commands():
                yield f"kvctl {said[1]}"
        elif said[:1] == ["kvd"]:
            options = {
                text for action in daemon.parser()._actions for text in action.option_strings
            }
            flags = {word.split("=")[0] for word in said if word.startswith("--")}
            yield from (f"kvd {flag}" for flag in sorted(flags - options))
    for module in re.findall(r"python3? -m ([\w.]+)", line):
        if module.split(".")[0] in ("kvd", "bench", "tests", "engine_shim"):
            path = ROOT.joinpath(*module.split("."))
            if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
                yield f"python -m {module}"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command, comments=True)
    except ValueError:  # half of a quotation, cut at a `|` or `;` inside it
        return command.split()


def _is_target(word: str) -> bool:
    return word in make_targets() or word.startswith(("-", "#")) or word.isupper()


def missing_links(path: Path) -> Iterator[str]:
    """Yield the relative links of a Markdown file that lead nowhere."""
    for target in _LINK.findall(text_of(path)):
        if "://" not in target and not (path.parent / target).exists():
            yield target


@pytest.mark.parametrize("path", TEXTS, ids=at)
def test_everything_named_exists(path: Path) -> None:
    wrong = [word for line in code_of(text_of(path)) for word in unknown_words(line)]
    wrong += missing_links(path)
    assert not wrong, report(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "kvctl nothing",
        "kvd --nothing",
        "python -m bench.nothing",
        "true && make no",
    ],
)
def test_unknown_words_are_seen(line: str) -> None:
    assert len(list(unknown_words(line))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "make lint test",
        'make demo DEMO_ARGS="--tokens 4096"',
        "kvctl status --watch 2",
        "kvd --set pool.size=64GiB",
        "python -m bench.kernels_copy --gate",
        "systemctl start kvd",
    ],
)
def test_known_words_pass(line: str) -> None:
    assert list(unknown_words(line)) == []


def test_links_that_lead_nowhere_are_seen(tmp_path: Path) -> None:
    (tmp_path / "there.md").touch()
    text = tmp_path / "text.md"
    text.write_text("[a](there.md) [b](https://x.y/z) [c](gone.md#part)", encoding="utf-8")
    assert list(missing_links(text)) == ["gone.md"]
