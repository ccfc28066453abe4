"""The project's own files, and how a rule reports where it is broken."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

SHIPPED: Final = ("kvd", "engine_shim", "kernels/kvd_kernels")
"""Packages of the wheel."""

TOPS: Final = ("kvd", "engine_shim", "kernels", "bench", "tests", ".ci")
"""Directories with code."""

TEXT_TOPS: Final = (*TOPS, "docs", "etc", "systemd", "requirements")

CPP: Final = frozenset({".cpp", ".hpp", ".inc"})
GENERATED: Final = frozenset({"__pycache__", ".hypothesis"})
_MODULE: Final = re.compile(r"(kvd|engine_shim|kvd_kernels|bench|tests)(\.\w+)+")
NOT_TEXT: Final = frozenset({".so", ".pyc", ".bin", ".png"})


def files(*tops: str) -> Iterator[Path]:
    """Yield the files under some directories of the project, in a fixed order."""
    for top in tops:
        for path in sorted((ROOT / top).rglob("*")):
            if path.is_file() and not GENERATED.intersection(path.parts):
                yield path


def python_files(*tops: str) -> Iterator[Path]:
    """Yield the Python files, without stubs."""
    return (path for path in files(*tops) if path.suffix == ".py")


def text_files() -> Iterator[Path]:
    """Yield every file that a person may read, those at the top included."""
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and path.name not in ("LICENSE", ".git"):
            yield path
    yield from (path for path in files(*TEXT_TOPS) if path.suffix not in NOT_TEXT)


@cache
def text_of(path: Path) -> str:
    """Return a file's text."""
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a Python file's syntax tree."""
    return ast.parse(text_of(path), str(path))


def at(path: Path, line: int = 0) -> str:
    """Return how a place is named in a report."""
    name = str(path.relative_to(ROOT)) if path.is_absolute() else str(path)
    return f"{name}:{line}" if line else name


def module_of(path: Path) -> str:
    """Return the name a Python file is imported by."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "kernels":
        parts = parts[1:]
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def imports_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each module that a tree names in an import, and the line.

    `from a import b` yields both `a` and `a.b`: b may be a module. A text that names a module of
    ours in full counts too: modules are also loaded by name, beside other work.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Constant) and _MODULE.fullmatch(str(node.value)):
            yield str(node.value), node.lineno


def report(found: Iterable[str]) -> str:
    """Return a text that lists every breach, for the message of an assertion."""
    return "\n".join(("", *sorted(found)))
