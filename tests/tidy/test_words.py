"""One word for each thing, and text that speaks of the project alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.tidy.sources import SHIPPED, at, files, report, text_files, text_of

HERE: Final = Path(__file__).resolve()
READ_BY_PEOPLE: Final = ("README.md", "CHANGELOG.md")


class Word(NamedTuple):
    """A word that is not said: how it is found, what to say, and a text that breaks the rule."""

    pattern: str
    say: str
    example: str


GLOSSARY: Final = (
    Word(r"\bshel(f|ves)\b", "hot buffer", "the shelf of a request"),
    Word(r"\bhot cache\b", "hot buffer", "rows of the hot cache"),
    Word(r"\b(storage slot|tray)s?\b", "slot", "a tray per layer"),
    Word(r"\bref_?counts?\b", "hold, or pin", "the refcount of a slot"),
    Word(r"\b(kv|tensor) groups?\b", "layer group", "one kv group"),
    Word(r"\bprefetch[ _]depth\b", "lookahead", "a prefetch depth of 2"),
    Word(r"\barenas?\b", "pool, or region", "the arena of the node"),
    Word(r"\bswap(s|ped|ping)?[ _](in|out)\b", "load, or save", "blocks swapped out"),
    Word(r"(?<!hold[_-])\bttl\b", "lease, or a deadline by name", "the ttl of a pin"),
    Word(r"\breclaim(s|ed|ing)?\b", "release", "the slot is reclaimed"),
    Word(r"\bkv pages?\b", "block", "a kv page holds 16 tokens"),
    Word(r"\bonload(s|ed|ing)?\b(?!_)", "load", "onloading a layer"),
)

PROJECT: Final = (
    Word(r"/(root|home|work|Users)/", "a path relative to the checkout", "see /ho" + "me/me/kvd"),
    Word(r"/opt/(wheels|pypi)", "nothing: pip's own configuration", "from /opt/whe" + "els"),
    Word(
        r"\b(pypi\.org|pythonhosted|npmjs)\b", "nothing: pip's own configuration", "pypi" + ".org"
    ),
    Word(r"--(extra-)?index-url\b", "nothing: pip's own configuration", "--index" + "-url X"),
    Word(r"\b[Ii]ssue [A-Z]\b", "what is meant", "see issue " + "B"),
    Word(r"\bcolleagues?\b", "who is meant in terms of the project", "a collea" + "gue's part"),
    Word(r"\b(generated|written|assisted) (by|with) (an? )?AI\b", "nothing", "written by " + "AI"),
)


def breaches(path: Path, words: tuple[Word, ...]) -> list[str]:
    """Return where a file breaks a rule, and what to say instead."""
    return [
        f"{at(path, number)} {word.pattern}: say {word.say}"
        for number, line in enumerate(text_of(path).splitlines(), 1)
        for word in words
        if re.search(word.pattern, line, re.IGNORECASE if word in GLOSSARY else 0)
    ]


@pytest.mark.parametrize("word", [*GLOSSARY, *PROJECT], ids=lambda word: word.pattern)
def test_rule_sees_its_example(word: Word, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text(f"first line\n{word.example}\n", encoding="utf-8")
    assert re.search(word.pattern, text_of(file), re.IGNORECASE)


@pytest.mark.parametrize("text", ["hold_ttl", "onload_layer_map", "a ring buffer", "swap space"])
def test_good_words_pass(text: str) -> None:
    assert not any(re.search(word.pattern, text, re.IGNORECASE) for word in GLOSSARY)


def test_glossary() -> None:
    """Shipped code and what people read say one word for one thing."""
    inside = [
        *files(*SHIPPED, "kernels", "docs", "etc"),
        *(at_top(name) for name in READ_BY_PEOPLE),
    ]
    texts = [path for path in inside if path.suffix in (".py", ".md", ".toml", ".cpp", ".hpp")]
    found = [line for path in sorted(set(texts)) for line in breaches(path, GLOSSARY)]
    assert not found, report(found)


def test_project_alone() -> None:
    """No file names a build machine, a package host or who did what."""
    found = [line for path in text_files() if path != HERE for line in breaches(path, PROJECT)]
    assert not found, report(found)


def at_top(name: str) -> Path:
    """Return the path of a file at the top of the checkout."""
    return HERE.parents[2] / name
