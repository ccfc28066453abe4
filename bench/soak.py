"""Soak: kvd, its engines and its holder are killed at random points; a checker knows every byte.

`python -m bench.soak --kills 200 --minutes 30 --json FILE`. Engines save blocks and look at what
they saved (`bench.soak_engine`); their journals say what must be a hit. After each kill of kvd,
everything that was acknowledged is looked up and read. Without kills it is the long run: memory,
descriptors, threads and tasks must not grow.
"""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress

from bench.report import Better, Row, argument_parser, finish, measure
from bench.soak_checks import Checker, Growth, SoakFailed, slope_mib
from engine_shim.reference.demo.processes import OwnDaemon, pause

ROOT: Final = Path(__file__).parents[1]
NUM_ENGINES: Final = 2
POOL: Final = "64MiB"
SETTINGS: Final = (
    f"pool.size={POOL}",
    "pool.huge_pages=off",
    "pool.headroom=0B",
    "pool.owner=holder",
    "pool.hold_ttl=30s",
)
WAIT_SECONDS: Final = 60.0
PROGRESS_SECONDS: Final = 30

EARLIER: Final = "+earlier"
FIRST_FINDER: Final = """
import importlib.machinery, pathlib, sys


class Earlier:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != "kvd":
            return None
        here = [str(pathlib.Path(__file__).parent)]
        return importlib.machinery.PathFinder.find_spec(name, path or here, target)


sys.meta_path.insert(0, Earlier)
"""
"""Run at the start of an interpreter: the package beside it wins over an installed checkout."""


@dataclass
class Soak:
    """One run."""

    directory: Path
    draw: random.Random
    daemon: OwnDaemon
    engines: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ready_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=lambda: {"kvd": 0, "engine": 0, "holder": 0})
    checked: int = 0
    written: dict[str, int] = field(default_factory=dict)
    """Size of each journal when it was looked at last."""

    # Processes --------------------------------------------------------------------------------

    def start_engine(self, name: str) -> None:
        """A new life of an engine."""
        command = [sys.executable, "-m", "bench.soak_engine", name]
        command += [str(self.daemon.runtime_dir), str(self.journal(name))]
        with (self.directory / f"{name}.log").open("ab") as log:
            self.engines[name] = subprocess.Popen(
                [*command, str(self.draw.getrandbits(30))], stdout=log, stderr=log
            )

    def journal(self, name: str) -> Path:
        """Where an engine writes what it has done."""
        return self.directory / f"{name}.journal"

    def status(self) -> dict[str, Any]:
        """What kvd says of itself."""
        code, document = self.daemon.get("/v1/status")
        assert code == 200
        assert isinstance(document, dict)
        return document

    def members(self) -> int:
        """Members that have said hello."""
        return sum(engine["members"] for engine in self.status()["engines"])

    def holder_pid(self) -> int:
        """Of the process that keeps the memory."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--hold" in words and os.fsencode(self.daemon.runtime_dir) in words:
                return int(path.parent.name)
        return 0

    def until(self, what: str, condition: Any) -> None:
        """Wait for something that another process brings about."""
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            if time.monotonic() > end:
                raise SoakFailed(f"did not come about: {what}\n{self.daemon.log()}")
            for name, process in self.engines.items():
                if process.poll() is not None:
                    log = (self.directory / f"{name}.log").read_text(errors="replace")
                    raise SoakFailed(f"engine {name} ended by itself:\n{log[-2000:]}")
            pause(0.01)

    # Kills ------------------------------------------------------------------------------------

    def kill_something(self) -> None:
        """Kill one of them at a random point of its work, and let it come back."""
        pause(self.draw.uniform(0.02, 0.5))
        victim = self.draw.choices(("kvd", "engine", "holder"), (7, 2, 1))[0]
        self.kills[victim] += 1
        if victim == "kvd":
            self.kill_kvd()
        elif victim == "engine":
            name = self.draw.choice(sorted(self.engines))
            self.engines[name].kill()
            self.engines[name].wait()
            self.start_engine(name)
            self.until("the engine attaches", lambda: self.members() == NUM_ENGINES)
        else:
            self.kill_holder()

    def kill_holder(self) -> None:
        """Kill the holder; kvd must find another one before it may die itself."""
        lost = self._owners_lost()
        os.kill(self.holder_pid(), signal.SIGKILL)
        self.until("kvd notices", lambda: self._owners_lost() > lost)
        self.until("another holder", lambda: self.status()["memory"]["owner"] == "holder")

    def _owners_lost(self) -> int:
        return int(self.status()["counters"].get("owner_lost", 0))

    def kill_kvd(self) -> None:
        """Kill kvd; its next life must know everything that was acknowledged."""
        self.daemon.stop(signal.SIGKILL)
        began = time.monotonic()
        self.daemon.start()
        self.ready_s.append(time.monotonic() - began)
        self.until("all members are back", lambda: self.members() == NUM_ENGINES)
        self.back_s.append(time.monotonic() - began)
        self.check()

    def check(self) -> None:
        """Look at every byte that must be there."""
        journals = [self.journal(name) for name in self.engines]
        with Checker(str(self.daemon.runtime_dir), journals) as checker:
            self.checked += checker.run()
        invariants = self.status()["invariants"]
        if not invariants["ok"]:
            raise SoakFailed(f"kvd's books contradict themselves: {invariants}")

    def check_progress(self) -> None:
        """Every engine has done something since this was asked last.

        Raises: SoakFailed: one is stuck or has ended, and a quiet run would prove nothing.
        """
        for name, process in self.engines.items():
            size = self.journal(name).stat().st_size
            if process.poll() is not None or size == self.written.get(name):
                log = (self.directory / f"{name}.log").read_text(errors="replace")
                raise SoakFailed(f"engine {name} did nothing for a while:\n{log[-2000:]}")
            self.written[name] = size

    def close(self) -> None:
        """End everything."""
        for process in self.engines.values():
            process.kill()
            process.wait()
        self.daemon.stop(signal.SIGTERM)
        self.daemon.close()


@contextmanager
def earlier_source(revision: str) -> Iterator[Path]:
    """The package `kvd` as of a commit of this checkout, in a directory of its own.

    Raises: SoakFailed: there is no such commit, or no git.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-earlier-") as name:
        command = ["git", "-C", str(ROOT), "archive", revision, "kvd"]
        try:
            packed = subprocess.run(command, capture_output=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise SoakFailed(f"the source of {revision} cannot be had: {error}") from error
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(name, filter="data")
        with (Path(name) / "kvd" / "__init__.py").open("a", encoding="utf-8") as package:
            package.write(f'__version__ += "{EARLIER}"\n')
        (Path(name) / "sitecustomize.py").write_text(FIRST_FINDER, encoding="utf-8")
        yield Path(name)


def run(
    kills: int,
    minutes: float,
    seed: int,
    settings: Sequence[str] = (),
    upgrade_from: str = "",
) -> list[Row]:
    """Soak until both the kills and the minutes are done; returns the figures.

    Args: upgrade_from: begin with the kvd of this commit, and go on with the present one.
    Raises: SoakFailed: something that was acknowledged is lost or wrong, or a process is stuck.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-soak-")))
        source = stack.enter_context(earlier_source(upgrade_from)) if upgrade_from else None
        daemon = OwnDaemon(*SETTINGS, *settings, source=source)
        soak = Soak(directory, random.Random(seed), daemon)
        stack.callback(soak.close)
        daemon.start()
        for number in range(NUM_ENGINES):
            soak.start_engine(f"engine{number}")
        soak.until("the engines attach", lambda: soak.members() == NUM_ENGINES)
        progress = stack.enter_context(Progress(transient=True))
        end = time.monotonic() + 60 * minutes
        task = progress.add_task("soak", total=max(1, kills + int(60 * minutes)))
        if source is not None:
            if EARLIER not in soak.status()["version"]:
                raise SoakFailed("the present kvd was started, not the earlier one")
            pause(1.0)
            daemon.source = None
            soak.kill_kvd()
        for _ in range(kills):
            soak.kill_something()
            progress.advance(task)
        soak.check()
        growth = Growth(daemon)
        while time.monotonic() < end:
            pause(1.0)
            growth.sample()
            if growth.seconds % PROGRESS_SECONDS == 0:
                soak.check_progress()
            progress.advance(task)
        soak.check()
        growth.settle()
        return rows_of(soak, growth)


def rows_of(soak: Soak, growth: Growth) -> list[Row]:
    """The figures; whatever was lost or wrong has raised already."""
    rows = [
        measure(f"kill -9 of {name}", "times", [count], unit="")
        for name, count in soak.kills.items()
    ]
    rows.append(measure("acknowledged blocks", "read and right", [soak.checked], unit="blocks"))
    if soak.ready_s:
        rows.append(
            measure(
                "kvd after kill -9", "ready after start", soak.ready_s, unit="s",
                target=1.0, better=Better.LOWER,
            )
        )  # fmt: skip
        rows.append(
            measure(
                "members", "attached again after start", soak.back_s, unit="s",
                target=2.0, better=Better.LOWER,
            )
        )  # fmt: skip
    if growth.seconds >= Growth.WARM_UP_SECONDS + 60:
        rows.append(
            measure(
                "resident memory", "growth per 10 minutes", [slope_mib(growth.rss)], unit="MiB",
                target=1.0, better=Better.LOWER,
            )
        )  # fmt: skip
    for name, more in growth.left_over.items():
        rows.append(
            measure(name, "more at the end", [more], unit="", target=0, better=Better.LOWER)
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns the exit status."""
    parser = argument_parser(__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="kills at random points")
    parser.add_argument("--minutes", type=float, default=0.0, metavar="M", help="run on so long")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the random points")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of kvd"
    )
    parser.add_argument(
        "--upgrade-from", default="", metavar="REV", help="begin with the kvd of this commit"
    )
    arguments = parser.parse_args(argv)
    try:
        rows = run(
            arguments.kills,
            arguments.minutes,
            arguments.seed,
            arguments.set,
            arguments.upgrade_from,
        )
    except SoakFailed as error:
        print(f"soak: seed {arguments.seed}: {error}", file=sys.stderr)
        return 1
    return finish("soak", rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
