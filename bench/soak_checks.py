"""What the soak looks at: every byte that must be there, and what must not grow."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, Self

from bench.soak_engine import block_hash, identity, is_right, read_journal
from engine_shim.client import ClientOptions, KvdClient
from engine_shim.reference.demo.processes import OwnDaemon, pause

LOOKS: Final = 10


class SoakFailed(Exception):
    """Something that was acknowledged is lost or wrong, or a process is stuck."""


class Checker:
    """A member that only looks."""

    def __init__(self, runtime_dir: str, journals: Sequence[Path]) -> None:
        """Attach."""
        self._journals = journals
        self._client = KvdClient(
            identity("checker", num_slots=0), runtime_dir, ClientOptions(deadline_s=20.0)
        )

    def run(self) -> int:
        """Look at every key that must be a hit; returns how many there were.

        Raises: SoakFailed.
        """
        count = 0
        for journal in self._journals:
            kept, _, wrong = read_journal(journal)
            if wrong:
                raise SoakFailed(f"{journal.stem} saw wrong bytes or a miss: {wrong[:5]}")
            for key in sorted(kept):
                count += self._look(journal, key)
        return count

    def _look(self, journal: Path, key: str) -> bool:
        client = self._client
        found = client.lookup("check", [block_hash(key)])
        right = bool(found) and is_right(client, key, found[0])
        client.abort("check")
        if right:
            return True
        if key in read_journal(journal)[0]:
            what = "has other bytes" if found else "is not found"
            raise SoakFailed(f"{key} was acknowledged, and {what}")
        return False  # its engine gave it up meanwhile

    def __enter__(self) -> Self:
        self._client.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.goodbye()


class Growth:
    """Memory, descriptors, threads and tasks of the present daemon over time."""

    WARM_UP_SECONDS: ClassVar = 60

    def __init__(self, daemon: OwnDaemon) -> None:
        """Look once."""
        assert daemon.process is not None
        self._daemon = daemon
        self._proc = Path(f"/proc/{daemon.process.pid}")
        self._before = self._counts()
        self.seconds = 0
        self.rss: list[float] = []
        """MiB, a sample a second, after the warm-up."""
        self.left_over: dict[str, float] = {}

    def sample(self) -> None:
        """A second has passed."""
        self.seconds += 1
        if self.seconds > self.WARM_UP_SECONDS:
            pages = int((self._proc / "statm").read_text(encoding="ascii").split()[1])
            # The pool is mapped, and becomes resident here as it is looked at: not counted.
            shared = int((self._proc / "statm").read_text(encoding="ascii").split()[2])
            self.rss.append((pages - shared) * os.sysconf("SC_PAGE_SIZE") / (1 << 20))

    def settle(self) -> None:
        """Compare with the beginning; the same engines are attached."""
        after = self._counts()
        self.left_over = {name: after[name] - self._before[name] for name in after}

    def _counts(self) -> dict[str, float]:
        """The least of some looks: a connection that is about to close is nothing that is left."""
        looks = []
        for _ in range(LOOKS):
            pause(0.1)
            files = [len(os.listdir(self._proc / what)) for what in ("fd", "task")]
            looks.append([*files, self._tasks()])
        descriptors, threads, tasks = (min(column) for column in zip(*looks, strict=True))
        return {"descriptors": descriptors, "threads": threads, "tasks": tasks}

    def _tasks(self) -> int:
        """Tasks of its event loop, the one that answers included."""
        _, text = self._daemon.get("/metrics")
        found = re.search(r'^kvd_process_figure\{figure="loop_tasks"\} (\S+)$', text, re.M)
        if found is None:
            raise SoakFailed("kvd does not say how many tasks it has")
        return int(float(found[1]))


def slope_mib(samples: Sequence[float]) -> float:
    """Growth per 10 minutes of samples a second apart, by least squares."""
    count = len(samples)
    mean_at, mean = (count - 1) / 2, sum(samples) / count
    above = sum((at - mean_at) * (value - mean) for at, value in enumerate(samples))
    below = sum((at - mean_at) ** 2 for at in range(count))
    return 600 * above / below
