"""Starts a program that ends with whoever started it, however that one ended.

The kernel kills it when the thread that started it is gone, so a demo or a test that was killed
with -9 leaves no daemon behind. This file is run between the two, `leash.py PARENT FD PROGRAM ...`,
because between fork and exec a process with threads may not run Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1


def popen(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    cwd: Path | None = None,
    process_group: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program as `subprocess.Popen` does; returns once it runs, or could not be run."""
    running, at_exec = os.pipe()
    with open(running, "rb") as pipe:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(at_exec), *command],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=env,
                cwd=cwd,
                pass_fds=(at_exec,),
                process_group=process_group,
            )
        finally:
            os.close(at_exec)
        pipe.read()
    return process


def main(argv: Sequence[str]) -> NoReturn:
    """Become the program; the descriptor FD is closed then.

    Raises: OSError when the kernel refuses, or there is no such program; SystemExit when the parent
        has gone already.
    """
    parent, at_exec, *command = argv
    os.set_inheritable(int(at_exec), False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        sys.exit(1)  # it was gone before the kernel could be asked
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
