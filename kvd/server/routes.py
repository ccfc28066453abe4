"""The paths of the admin API: what they take, what they answer. Served and described from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvd.server import models, models_tables
from kvd.server.models import Model
from kvd.server.problems import parameter_invalid
from kvd.server.views_story import ENTRIES_MAX
from kvd.server.views_tables import PAGE_MAX

_TEXT_CHARS_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter: an integer when it has a maximum, a choice when it has choices."""

    name: str
    description: str
    default: int | str = ""
    maximum: int = 0
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> int | str:
        """Return the value that a request gave.

        Raises: AdminError(parameter_invalid).
        """
        shown = repr(text[:40])
        if self.maximum:
            fix = f"Give a whole number between 1 and {self.maximum}."
            if not text.isascii() or not text.isdecimal() or len(text) > 9:
                raise parameter_invalid(self.name, f"{shown} is not a whole number", fix)
            if not 1 <= int(text) <= self.maximum:
                raise parameter_invalid(self.name, f"{shown} is out of range", fix)
            return int(text)
        if self.choices and text not in self.choices:
            fix = f"Use one of {', '.join(self.choices)}, or leave it out."
            raise parameter_invalid(self.name, f"{shown} is not known", fix)
        if not text or len(text) > _TEXT_CHARS_MAX:
            fix = f"Give a name of at most {_TEXT_CHARS_MAX} characters, or leave it out."
            raise parameter_invalid(self.name, "it is empty or too long", fix)
        return text


@dataclass(frozen=True, slots=True)
class Route:
    """One path.

    answer: model of the body, None when it is no JSON.
    also:   further HTTP statuses, with what they mean.
    """

    path: str
    summary: str
    answer: type[Model] | None = None
    parameters: tuple[Parameter, ...] = ()
    also: Mapping[int, str] | None = None

    def read(self, given: Mapping[str, str]) -> dict[str, int | str]:
        """Return the value of every parameter.

        Raises: AdminError(parameter_invalid): unknown, or a value that is not allowed.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                names = ", ".join(known) or "none"
                fix = f"This path takes {names}."
                raise parameter_invalid(name[:40], "it is not known", fix)
        return {
            name: parameter.read(given[name]) if name in given else parameter.default
            for name, parameter in known.items()
        }


STORY_PREFIX: Final = "/v1/story/"

_AFTER: Final = Parameter("after", "The `next` of the page before.")
_ENGINE: Final = Parameter("engine", "Only of this engine.")


def _limit(default: int, maximum: int) -> Parameter:
    return Parameter("limit", "Most items of the page; it may end earlier.", default, maximum)


ROUTES: Final = (
    Route(
        "/readyz",
        "Whether the node should get new work.",
        models.Readiness,
        also={503: "Not ready; the body says why."},
    ),
    Route("/v1/status", "The node at one look.", models.Status),
    Route(
        "/v1/slots",
        "Slots of the workers' rings, with who may still touch them.",
        models_tables.SlotPage,
        (
            _limit(100, PAGE_MAX),
            _AFTER,
            _ENGINE,
            Parameter("member", "Only of members with this name."),
            Parameter(
                "state",
                "Only in this state.",
                choices=("free", "held", "suspect", "quarantined"),
            ),
        ),
    ),
    Route(
        "/v1/blocks",
        "Blocks of the pool.",
        models_tables.BlockPage,
        (
            _limit(100, PAGE_MAX),
            _AFTER,
            Parameter("engine", "Only blocks that this engine fills, keeps or loads."),
            Parameter(
                "state",
                "Only in this state; used: all that are not free.",
                default="used",
                choices=("used", "free", "filling", "ready", "poisoned", "all"),
            ),
        ),
    ),
    Route(
        "/v1/engines",
        "Engines and their members.",
        models_tables.EnginePage,
        (_limit(100, PAGE_MAX), _AFTER),
    ),
    Route(
        STORY_PREFIX + "{id}",
        "The latest transitions about one slot, step, request, block, transfer or member.",
        models_tables.StoryPage,
        (
            Parameter("limit", "The latest so many.", 200, ENTRIES_MAX),
            Parameter(
                "format", "json, or text for people.", default="json", choices=("json", "text")
            ),
        ),
        {404: "Nothing that is still recorded names it."},
    ),
    Route("/v1/config", "Every key, its value and where that came from.", models_tables.ConfigPage),
    Route(
        "/metrics",
        "Figures for Prometheus (text format); see docs/metrics.md.",
        also={404: "Switched off by metrics.enabled."},
    ),
    Route("/openapi.json", "This description."),
)
"""All but /livez, which is answered before any of this is loaded."""
