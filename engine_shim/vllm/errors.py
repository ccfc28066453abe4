"""Errors of the connector."""

from __future__ import annotations


class UnsupportedEngine(RuntimeError):
    """This vLLM, or a way to run it, is not supported; the text says what is."""
