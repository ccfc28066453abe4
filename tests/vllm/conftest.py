"""The tier in a real vLLM: its variables, which must be set before vLLM is imported, and fixtures.

Scheduler and worker run in the process of the test, one thread each, from files that are there:
nothing asks a hub, reports use, or compiles.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two cores: vLLM's own binding takes one away
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "TORCH_COMPILE_DISABLE": "1",  # else the first request with logprobs compiles for 30 s
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "KVD_CPU_SPARSE": "1",
    }
)
"""What every test of this tier needs in the environment of its process, and of its children."""

OWN_FOLDERS: Final = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "HF_HOME")
_FOLDER: Final = pytest.StashKey[Path]()

collect_ignore_glob: Final = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Set the variables; let vLLM and what it imports warn, but nothing of ours."""
    folder = config.stash[_FOLDER] = Path(tempfile.mkdtemp(prefix="kvd-vllm-"))
    os.environ.update(VARIABLES)
    os.environ.update({name: str(folder / name.lower()) for name in OWN_FOLDERS})
    for line in ("ignore", r"error:::(engine_shim|kvd|kvd_kernels|tests)(\..*)?"):
        config.addinivalue_line("filterwarnings", line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what vLLM wrote."""
    shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)
