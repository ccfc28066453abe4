"""The compiler takes what the interpreter takes: kernels are compiled, without a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.capabilities import need_module

need_module("triton", "python3 .ci/environment.py triton, then use the Python it names")

CHILD = Path(__file__).with_name("compile_kernels.py")


def test_every_kernel_compiles_for_cuda(tmp_path: Path) -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        (sys.executable, str(CHILD)), env=variables, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built = {line.split()[0] for line in done.stdout.splitlines()}
    residency = {"lim", "look_up", "find_victims", "place", "admit_row", "invalidate"}
    assert built == residency | {"locate", "gather_part"}


def test_without_triton_the_import_says_what_to_install() -> None:
    code = "import sys, importlib.util; importlib.util.find_spec = lambda name: None\n"
    code += "import kvd_kernels.triton_ops"
    command = (sys.executable, "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "kvd_kernels.triton_ops needs the Python package triton" in done.stderr
    assert "triton-ascend" in done.stderr
