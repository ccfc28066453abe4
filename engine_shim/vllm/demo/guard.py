"""Runs a server that has processes of its own, and ends all of them: `guard.py PROGRAM ...`.

A vLLM server is three processes, and two of them outlive the first where that is killed. So each
server has a guard between itself and the demo:

* the server is a process group, so that one signal reaches all of it, and Ctrl-C none of it;
* what its processes leave behind becomes the guard's child, and is waited for;
* a line on standard input is a signal for the first process; the end of the input, which comes
  whatever the demo died of, is kill -9 of the group.

The guard ends when nothing of the server is left, with the first process's status.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from engine_shim.reference.demo.leash import popen

_PR_SET_CHILD_SUBREAPER: Final = 36
STDIN: Final = 0


def main(command: Sequence[str]) -> int:
    """Run a program until it ends, or the input does; returns its status, 128 + N for a signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_over)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    first = popen(command, stdin=subprocess.DEVNULL, env=os.environ, process_group=0)
    try:
        _watch(first)
    finally:
        _end_group(first)
    status = first.returncode
    return status if status >= 0 else 128 - status


def _pass_over(*_: object) -> None:
    """The demo says when the server ends; a handler, since what is ignored stays so in children."""


def _watch(first: subprocess.Popen[bytes]) -> None:
    """Until the first process or the input ends."""
    ended = os.pidfd_open(first.pid)
    try:
        while ended not in (ready := select.select([STDIN, ended], [], [])[0]):
            assert ready == [STDIN]
            orders = os.read(STDIN, 4096)
            if not orders:
                return
            for order in orders.split():
                first.send_signal(int(order))
    finally:
        os.close(ended)


def _end_group(first: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the group, and wait until the kernel has taken all of it away."""
    # The first process is not collected yet: the number of its group cannot be another's.
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
