"""Rules over one file: each yields the lines that break it, and what they break.

They are functions of a text or a tree, so that every rule is also tried on a planted breach.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

Breach = tuple[int, str]

LINE_MAX: Final = 100
FILE_LINES_MAX: Final = 400
FUNCTION_LINES_MAX: Final = 60

_FILLED_LATER: Final = frozenset({"defaultdict", "Counter", "deque", "WeakValueDictionary"})
_CONTAINERS: Final = frozenset({"list", "dict", "set", "bytearray", "OrderedDict"})
_DISPLAYS: Final = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_CONSTANT: Final = re.compile(r"\b(Final|Mapping|Sequence|MappingProxyType|Set)\b")
_CPP_FUNCTION: Final = re.compile(r"^( *)(?!namespace|struct|class|enum|extern|union)\S.*\) ?.*\{$")
_WORD_TO_A_TOOL: Final = re.compile(r"\s+# (type: ignore|noqa).*")
_LEFTOVERS: Final = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")


def long_lines(text: str) -> Iterator[Breach]:
    """Lines over `LINE_MAX` columns, a word to a tool at their end not counted."""
    for number, line in enumerate(text.splitlines(), 1):
        width = len(_WORD_TO_A_TOOL.sub("", line))
        if width > LINE_MAX:
            yield number, f"{width} columns, at most {LINE_MAX}"


def long_file(text: str) -> Iterator[Breach]:
    """A file over `FILE_LINES_MAX` lines."""
    count = len(text.splitlines())
    if count > FILE_LINES_MAX:
        yield 0, f"{count} lines, at most {FILE_LINES_MAX}"


def long_functions(tree: ast.Module) -> Iterator[Breach]:
    """Functions over `FUNCTION_LINES_MAX` lines, decorators and docstring not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = _lines_of(node)
            if ast.get_docstring(node) is not None:
                count -= _lines_of(node.body[0])
            if count > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {count} lines, at most {FUNCTION_LINES_MAX}"


def _lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def long_cpp_functions(text: str) -> Iterator[Breach]:
    """C++ functions over `FUNCTION_LINES_MAX` lines, by indentation: `{` to `}` below its line."""
    lines = text.splitlines()
    for start, line in enumerate(lines):
        match = _CPP_FUNCTION.match(line)
        if match is None or len(match.group(1)) > 2:
            continue
        end = next((n for n in range(start, len(lines)) if lines[n] == match.group(1) + "}"), start)
        if end - start + 1 > FUNCTION_LINES_MAX:
            yield start + 1, f"a function of {end - start + 1} lines, at most {FUNCTION_LINES_MAX}"


def broad_excepts(tree: ast.Module) -> Iterator[Breach]:
    """Handlers that catch everything."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        for kind in kinds:
            name = kind.id if isinstance(kind, ast.Name) else None
            if kind is None or name in ("Exception", "BaseException"):
                yield node.lineno, "catches everything: name what can fail"


def sleeps(text: str) -> Iterator[Breach]:
    """Sleeps, in scripts for child processes too; giving way once (`sleep(0)`) is none."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\bsleep\((?!0\))", line):
            yield number, "sleeps: wait for a condition"


def native_code_hidden(text: str) -> Iterator[Breach]:
    """Import paths that lead to the sources of `kernels`, which hide the built package."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(PYTHONPATH|sys\.path)\b.*\bkern" r"els\b", line):
            yield number, "puts kernels/ on the import path: its native modules are not in there"


def mutable_globals(tree: ast.Module) -> Iterator[Breach]:
    """State of a module: what is empty and can be filled, and names that functions assign to.

    A table that is written down whole is no state where its annotation says so (`Final`, or a
    read-only type such as `Mapping`), or its name in capitals does.
    """
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value, annotation = node.targets, node.value, ""
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
            annotation = ast.unparse(node.annotation)
        else:
            continue
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        is_table = bool(_CONSTANT.search(annotation)) or all(name.isupper() for name in names)
        if names not in (["__all__"], ["pytestmark"]) and (
            _is_fillable(value) or (_is_display(value) and not is_table)
        ):
            yield node.lineno, f"{', '.join(names)} is state of the module: give it an owner"
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            yield inner.lineno, f"assigns to the module's {', '.join(inner.names)}"


def _is_fillable(value: ast.expr) -> bool:
    """Whether this is an empty container, or one that fills itself."""
    if isinstance(value, ast.Call):
        function = value.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        return name in _FILLED_LATER or (name in _CONTAINERS and not value.args)
    parts = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", None)
    return isinstance(value, ast.List | ast.Dict) and not parts


def _is_display(value: ast.expr) -> bool:
    return isinstance(value, _DISPLAYS)


def unexplained(tree: ast.Module) -> Iterator[Breach]:
    """A module, or a public class or function, without a docstring.

    A method that fulfils a documented one of a base class needs none, nor does a function inside
    a function.
    """
    if tree.body and ast.get_docstring(tree) is None:
        yield 1, "the module has no docstring"
    for node in tree.body:
        yield from _unexplained(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                yield from _unexplained(inner, is_method=True)


def _unexplained(node: ast.stmt, *, is_method: bool = False) -> Iterator[Breach]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    is_told_elsewhere = bool(decorators & {"override", "overload", "setter"}) or any(
        isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == "__doc__"
        for inner in node.body
    )
    if node.name.startswith("_") or is_told_elsewhere or ast.get_docstring(node) is not None:
        return
    yield node.lineno, f"{'method' if is_method else 'public'} {node.name} has no docstring"


def leftovers(text: str) -> Iterator[Breach]:
    """Notes of work that is not done."""
    for number, line in enumerate(text.splitlines(), 1):
        if _LEFTOVERS.search(line):
            yield number, "is unfinished: finish it, or leave it out"


def stubs(tree: ast.Module) -> Iterator[Breach]:
    """Code that says it is not there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "NotImplemented" + "Error":
            yield node.lineno, "is a stub: use a Protocol or an abstract method"
