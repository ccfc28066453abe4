"""Errors of the connector."""

from __future__ import annotations


class UnsupportedEngine(RuntimeError):
    """This vLLM, or a way to run it, is not supported; the text says what is."""


class OptionError(ValueError):
    """An option cannot be used; the text names the key, the value and what it may be."""


class PlanError(ValueError):
    """The engine cannot run like this; the text says what to change."""
