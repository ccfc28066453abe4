"""How soon a new daemon answers, and what it weighs without its pool.

* process start -> /livez says 200
* process start -> /readyz says STARTING with a percentage (or that all is populated by then)
* processor time that the daemon spent by its first answer, which other load does not change
* resident memory once it is ready, shared memory (the pool, its index, gate pages) not counted

    python -m bench.startup [--json FILE] [--gate] [--rounds N] [--pool SIZE]
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.report import Better, argument_parser, finish, measure

ANSWER_SECONDS_MAX: Final = 0.7
RESIDENT_MB_MAX: Final = 80.0
MB: Final = 1e6

_ROUNDS: Final = 10
_POOL: Final = "1GiB"  # enough that STARTING is seen, and quickly populated
_POLL_SECONDS: Final = 0.002
_GIVE_UP_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a daemon; times in seconds since just before its process was made.

    livez:          /livez answered 200.
    phase, percent: what /readyz said first, `starting` or `ready`, and of how much of the memory.
    first_state:    when it said so.
    ready:          /readyz answered 200.
    processor:      seconds of processor time spent when /livez answered.
    resident_bytes: anonymous and file-backed memory once ready; without the pool.
    exit_code:      how it ended when it was told to.
    """

    livez: float
    phase: str
    percent: int
    first_state: float
    ready: float
    processor: float
    resident_bytes: int
    exit_code: int


def get(path: Path, what: str) -> tuple[int, Any] | None:
    """GET from the admin socket: status and document; None while nobody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_GIVE_UP_SECONDS)
        try:
            connection.connect(str(path))
            connection.sendall(f"GET {what} HTTP/1.0\r\nHost: kvd\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except (FileNotFoundError, ConnectionError):
            return None
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def start_once(command: Sequence[str], pool: str = _POOL) -> Start:
    """Start a daemon by a command, ask it until it is ready, and end it.

    Raises: RuntimeError with what it said when it ends by itself or never becomes ready.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-") as directory:
        run, log = Path(directory) / "run", Path(directory) / "log"
        whole = [*command, "--runtime-dir", str(run), "--set", f"pool.size={pool}"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVD_", "NOTIFY_"))}
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(whole, stdout=output, stderr=output, env=clean)
        try:
            return _watch(process, run / "admin.sock", began)
        except TimeoutError as error:
            raise RuntimeError(f"{error}: {log.read_text(errors='replace')[-4000:]}") from error
        finally:
            process.kill()
            process.wait()


def _watch(process: subprocess.Popen[bytes], path: Path, began: float) -> Start:
    for _ in _polls(process, began):
        answer = get(path, "/livez")
        if answer is not None and answer[0] == 200:
            break
    livez, processor = time.monotonic() - began, processor_seconds(process.pid)
    first: tuple[dict[str, Any], float] | None = None
    for _ in _polls(process, began):
        answer = get(path, "/readyz")
        if answer is not None:
            first = first or (answer[1], time.monotonic() - began)
            if answer[0] == 200:
                break
    assert first is not None
    ready, resident = time.monotonic() - began, _resident_bytes(process.pid)
    process.send_signal(signal.SIGTERM)
    code = process.wait(_GIVE_UP_SECONDS)
    said, first_state = first
    phase, percent = str(said["phase"]), int(said["percent"])
    return Start(livez, phase, percent, first_state, ready, processor, resident, code)


def _polls(process: subprocess.Popen[bytes], began: float) -> Iterator[None]:
    """Yield until the caller is content, a moment apart: nobody tells when a socket appears.

    Raises: TimeoutError when the process has ended or much time has gone by.
    """
    while process.poll() is None and time.monotonic() - began < _GIVE_UP_SECONDS:
        yield
        select.select([], [], [], _POLL_SECONDS)
    raise TimeoutError(f"kvd ended ({process.poll()}) or did not answer")


def processor_seconds(pid: int) -> float:
    """Processor time that a process has spent so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return sum(int(sizes[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argument_parser("how soon a new daemon answers, and what it weighs")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N")
    parser.add_argument("--pool", default=_POOL, metavar="SIZE", help=f"default {_POOL}")
    arguments = parser.parse_args(argv)
    command = (sys.executable, "-m", "kvd")
    starts = [start_once(command, arguments.pool) for _ in range(arguments.rounds)]
    case = f"kvd with a pool of {arguments.pool}"
    answers = {
        "start to /livez": [start.livez for start in starts],
        "start to STARTING, percent": [start.first_state for start in starts],
    }
    lower = Better.LOWER
    limit = ANSWER_SECONDS_MAX
    resident = [start.resident_bytes / MB for start in starts]
    rows = [
        *(measure(case, m, s, unit="s", target=limit, better=lower) for m, s in answers.items()),
        measure(case, "start to ready", [start.ready for start in starts], unit="s"),
        measure(case, "processor, to /livez", [start.processor for start in starts], unit="s"),
        measure(case, "memory", resident, unit="MB", target=RESIDENT_MB_MAX, better=lower),
    ]
    return finish("startup", rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
