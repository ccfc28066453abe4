"""Ctrl-C, however often it is pressed: one KeyboardInterrupt, and none while things are in hand."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Final, Self

PATIENCE_SECONDS: Final = 2.0
INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as a shell has it."""


class Interrupts:
    """Turns SIGINT into KeyboardInterrupt while it is entered; the main thread only.

    What is pressed within `PATIENCE_SECONDS` of the one that was raised means the same and is
    ignored; later ones are raised again, in case the first was lost in code that lets nothing out.
    Once a KeyboardInterrupt leaves it, SIGINT stays ignored: the program is ending.
    """

    def __init__(self) -> None:
        self._before: object = None
        self._holds = 0
        self._is_pending = False
        self._patient_until = 0.0

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ignored = kind is not None and issubclass(kind, KeyboardInterrupt)
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else self._before)  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is done in here is not interrupted.

        Raises: KeyboardInterrupt at its end, if SIGINT came meanwhile.
        """
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if self._is_pending and not self._holds:
                self._is_pending = False
                self._raise()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            self._is_pending = True
        elif time.monotonic() >= self._patient_until:
            self._raise()

    def _raise(self) -> None:
        self._patient_until = time.monotonic() + PATIENCE_SECONDS
        raise KeyboardInterrupt


def run_until_interrupted(command: Callable[[Interrupts], int]) -> int:
    """Run a command; returns its exit code.

    After Ctrl-C that is `INTERRUPTED`, everything is ended, and SIGINT stays ignored.
    """
    try:
        with Interrupts() as interrupts:
            return command(interrupts)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return INTERRUPTED
