"""Size, safety and completeness of every source file."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.tidy import rules
from tests.tidy.sources import CPP, SHIPPED, TOPS, at, files, python_files, report, text_of, tree_of

TextRule = Callable[[str], Iterator[rules.Breach]]
TreeRule = Callable[[ast.Module], Iterator[rules.Breach]]

TEXT_RULES: tuple[tuple[TextRule, tuple[str, ...], frozenset[str]], ...] = (
    (rules.long_lines, TOPS, CPP | {".py", ".pyi"}),
    (rules.long_file, TOPS, CPP | {".py", ".pyi"}),
    (rules.long_cpp_functions, ("kernels",), CPP),
    (rules.leftovers, TOPS, CPP | {".py", ".pyi", "", ".sh"}),
    (rules.sleeps, ("tests",), frozenset({".py"})),
    (rules.native_code_hidden, TOPS, frozenset({".py"})),
)
TREE_RULES: tuple[tuple[TreeRule, tuple[str, ...]], ...] = (
    (rules.long_functions, TOPS),
    (rules.broad_excepts, TOPS),
    (rules.mutable_globals, TOPS),
    (rules.unexplained, (*SHIPPED, "bench", ".ci")),
    (rules.stubs, (*SHIPPED, "bench", ".ci")),
)


def name_of(rule: object) -> str:
    """Return a rule's name, for the name of its test."""
    return getattr(rule, "__name__", "")


@pytest.mark.parametrize(("rule", "tops", "suffixes"), TEXT_RULES, ids=name_of)
def test_text(rule: TextRule, tops: tuple[str, ...], suffixes: frozenset[str]) -> None:
    found = [
        f"{at(path, line)} {what}"
        for path in files(*tops)
        if path.suffix in suffixes
        for line, what in rule(text_of(path))
    ]
    assert not found, report(found)


@pytest.mark.parametrize(("rule", "tops"), TREE_RULES, ids=name_of)
def test_tree(rule: TreeRule, tops: tuple[str, ...]) -> None:
    found = [
        f"{at(path, line)} {what}"
        for path in python_files(*tops)
        for line, what in rule(tree_of(path))
    ]
    assert not found, report(found)


_LONG_FUNCTION = "def f():\n" + "    pass\n" * rules.FUNCTION_LINES_MAX
_DOCUMENTED = _LONG_FUNCTION.replace("    pass\n", '    """F.\n\n    G."""\n', 1)
_LONG_CPP = "int f() {\n" + "  g();\n" * rules.FUNCTION_LINES_MAX + "}\n"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (rules.long_lines, "x" * (rules.LINE_MAX + 1)),
        (rules.long_file, "x\n" * (rules.FILE_LINES_MAX + 1)),
        (rules.long_cpp_functions, _LONG_CPP),
        (rules.leftovers, "# TO" + "DO: later"),
        (rules.sleeps, "await asyncio.sl" + "eep(0.1)"),
        (rules.native_code_hidden, 'env["PYTHON' + 'PATH"] = ".:kernels"'),
    ],
    ids=name_of,
)
def test_text_rule_sees_a_breach(rule: TextRule, text: str) -> None:
    assert len(list(rule(text))) == 1


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (rules.long_functions, _LONG_FUNCTION),
        (rules.broad_excepts, "try:\n    f()\nexcept (OSError, Exception):\n    pass"),
        (rules.broad_excepts, "try:\n    f()\nexcept:\n    pass"),
        (rules.mutable_globals, "seen = set()"),
        (rules.mutable_globals, "SEEN: Final[dict[int, int]] = {}"),
        (rules.mutable_globals, "table = {1: 2}"),
        (rules.mutable_globals, "def f():\n    global seen"),
        (rules.unexplained, '"""."""\ndef f(): ...'),
        (rules.unexplained, '"""."""\nclass C:\n    """."""\n    def f(self): ...'),
        (rules.unexplained, "import os"),
        (rules.stubs, "raise NotImplemented" + "Error"),
    ],
)
def test_tree_rule_sees_a_breach(rule: TreeRule, text: str) -> None:
    assert len(list(rule(ast.parse(text)))) == 1


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (rules.broad_excepts, "try:\n    f()\nexcept OSError:\n    pass"),
        (rules.mutable_globals, "__all__ = ['a']\na: Final = {1: 2}\nB = [1]\nc = frozenset()"),
        (rules.unexplained, '"""."""\nclass C:\n    """."""\n    @override\n    def f(self): ...'),
        (rules.long_functions, _DOCUMENTED),
    ],
)
def test_tree_rule_lets_good_code_pass(rule: TreeRule, text: str) -> None:
    assert list(rule(ast.parse(text))) == []
