"""Refusals of the admin API: catalogue errors, two kinds of its own, and their document.

The document is that of RFC 9457 (`application/problem+json`) with the code and the remedy beside
the standard members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from kvd.core.errors import CATALOGUE, ErrorSpec, KvdError, Retry

PROBLEM_TYPE: Final = "application/problem+json"

_ROWS: Final = (
    ErrorSpec(
        "parameter_invalid",
        400,
        Retry.NEVER,
        "parameter {name}: {detail}",
        "{fix}",
    ),
    ErrorSpec(
        "method_not_allowed",
        405,
        Retry.NEVER,
        "{path} cannot be asked with {method}",
        "Use {allowed}: the admin API only shows, it changes nothing.",
    ),
)

_PATH_UNKNOWN: Final = replace(
    CATALOGUE["not_found"],
    what="there is no path {path!r}",
    remedy="GET /openapi.json describes all that there are.",
)

ADMIN_ERRORS: Final = MappingProxyType({row.code: row for row in _ROWS})
"""Codes that only the admin API answers with."""

ALL_ERRORS: Final = MappingProxyType({**CATALOGUE, **ADMIN_ERRORS})
"""Every code that a client of the admin API can meet."""


class AdminError(KvdError):
    """A refusal whose row is given, not looked up by code."""

    def __init__(self, spec: ErrorSpec, **context: object) -> None:
        self.spec = spec
        self.context = {key: str(value) for key, value in context.items()}
        Exception.__init__(self, spec.code, self.context)


def parameter_invalid(name: str, detail: str, fix: str) -> AdminError:
    """Make the refusal of a query parameter."""
    return AdminError(ADMIN_ERRORS["parameter_invalid"], name=name, detail=detail, fix=fix)


def path_unknown(path: str) -> AdminError:
    """Make the refusal of a path that the admin API does not have."""
    return AdminError(_PATH_UNKNOWN, path=path[:200])


def method_not_allowed(method: str, path: str, allowed: Sequence[str]) -> AdminError:
    """Make the refusal of a method; `allowed` are the methods that the path has."""
    spec = ADMIN_ERRORS["method_not_allowed"]
    return AdminError(spec, method=method, path=path, allowed=" or ".join(sorted(allowed)))


def problem_document(error: KvdError) -> dict[str, object]:
    """Return the members of the document about an error."""
    return {
        "type": f"urn:kvd:error:{error.code}",
        "title": error.code.replace("_", " "),
        "status": error.spec.status,
        "detail": error.what,
        "code": error.code,
        "remedy": error.remedy,
    }
