"""Watches a kvd through `kvctl status --watch` and checks every sample for contradictions."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from engine_shim.reference.demo.leash import popen
from engine_shim.reference.demo.processes import clean_environment, kill

INTERVAL: Final = 0.05
PROBLEMS_KEPT: Final = 20


def contradictions(document: dict[str, Any]) -> list[str]:
    """What is wrong with one status document, looked at from outside."""
    found = [f"kvd says: {problem}" for problem in document["invariants"]["problems"]]
    pool = document["pool"]
    for what in ("blocks", "bytes"):
        parts = pool[what]
        states = sum(parts[state] for state in ("free", "filling", "ready", "poisoned"))
        if states != parts["total"]:
            found.append(f"pool {what}: {states} in all states, {parts['total']} in total")
        if min(parts.values()) < 0:
            found.append(f"pool {what}: a negative count in {parts}")
    if pool["bytes"]["total"] != pool["blocks"]["total"] * pool["block_bytes"]:
        found.append("pool: bytes are not blocks times block size")
    if pool["pinned_blocks"] + pool["evictable_blocks"] > pool["blocks"]["total"]:
        found.append("pool: more blocks pinned and evictable than there are")
    slots = document["slots"]
    if slots["free"] + slots["held"] + slots["quarantined"] < slots["total"]:
        found.append(f"slots: {slots} do not add up")
    return found


class Sampler:
    """Samples one kvd until it is closed."""

    def __init__(self, name: str, runtime_dir: Path) -> None:
        """Start to watch."""
        self.name = name
        self.samples = 0
        self.problems: list[str] = []
        self.num_problems = 0
        self.peak_held = 0
        command = [
            sys.executable,
            "-m",
            "kvd.cli.kvctl",
            "--runtime-dir",
            str(runtime_dir),
            "status",
            "-o",
            "json",
            "--watch",
            str(INTERVAL),
        ]
        self._process = popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=clean_environment(),
        )
        self._thread = threading.Thread(target=self._run, name=f"sample-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if "invariants" not in document:
                continue
            self.samples += 1
            self.peak_held = max(self.peak_held, document["slots"]["held"])
            for problem in contradictions(document):
                self.num_problems += 1
                if len(self.problems) < PROBLEMS_KEPT:
                    self.problems.append(f"{self.name} sample {self.samples}: {problem}")

    def close(self) -> None:
        """Stop to watch."""
        kill(self._process)
        self._thread.join(10)
        if self._process.stdout is not None:
            self._process.stdout.close()
