"""The tier of Triton kernels: its interpreter, which must be asked for before it is imported."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Ask for the interpreter; let Triton warn, but nothing of ours."""
    os.environ["TRITON_INTERPRET"] = "1"
    for line in ("ignore", r"error:::(kvd_kernels|tests)(\..*)?"):
        config.addinivalue_line("filterwarnings", line)
