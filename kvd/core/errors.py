"""Errors of kvd: a code of the catalogue and the values that its sentence names.

Three kinds of trouble are never mixed:

* *ignored*: an expected race (a late or repeated completion). It is counted, never raised.
* *error*: somebody asked for something that cannot be. It carries a code from the catalogue, goes
  back to who asked, and changes nothing.
* *invariant*: kvd itself is wrong (`InvariantError`). The daemon stops and shows the story.
"""

from __future__ import annotations

from kvd.core.catalogue import CATALOGUE, ErrorSpec, Retry

__all__ = [
    "CATALOGUE",
    "ConfigError",
    "ErrorSpec",
    "InvariantError",
    "KvdError",
    "LocalError",
    "PeerError",
    "Retry",
]


class KvdError(Exception):
    """A refusal with a code of the catalogue and the values that its sentence names."""

    def __init__(self, code: str, **context: object) -> None:
        """Make the error.

        Args:
            code: a key of `CATALOGUE`; anything else is a bug and raises KeyError.
            context: values for the placeholders of the sentence and the remedy.
        """
        self.spec: ErrorSpec = CATALOGUE[code]
        self.context: dict[str, str] = {key: str(value) for key, value in context.items()}
        super().__init__(code, self.context)

    @property
    def code(self) -> str:
        """The stable identifier."""
        return self.spec.code

    def __str__(self) -> str:
        """Code, sentence and remedy in one line."""
        return f"{self.code}: {self.what} {self.remedy}"

    @property
    def what(self) -> str:
        """What is wrong, one sentence."""
        return self._fill(self.spec.what).rstrip(".") + "."

    @property
    def remedy(self) -> str:
        """What to do about it, one sentence."""
        return self._fill(self.spec.remedy)

    def _fill(self, text: str) -> str:
        return text.format_map(_Placeholders(self.context))


class _Placeholders(dict[str, str]):
    """Context for `str.format_map`: a name that was not given shows as `?`, never as a crash."""

    def __missing__(self, key: str) -> str:
        return "?"


class LocalError(KvdError):
    """Our own caller (an engine, an operator) asked for something that cannot be."""


class PeerError(KvdError):
    """The other side (a peer kvd, a remote reader) misbehaved or is gone."""


class ConfigError(KvdError):
    """The configuration cannot be used; `problems` has one line for each thing wrong."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = list(problems)
        super().__init__("config_invalid", detail="\n".join(problems))


class InvariantError(Exception):
    """kvd's own state contradicts itself. Never caught below the daemon's top level."""

    def __init__(self, problems: list[str], story: str = "") -> None:
        self.problems = list(problems)
        self.story = story
        super().__init__("; ".join(problems))
