"""The description of the admin API, made from the routes and the models."""

from __future__ import annotations

from typing import Any, Final

from pydantic.json_schema import models_json_schema

from kvd.server.models import Liveness, Model, Problem
from kvd.server.problems import PROBLEM_TYPE
from kvd.server.routes import ROUTES, STORY_PREFIX, Parameter, Route
from kvd.server.version_header import VERSION_HEADER

_REF: Final = "#/components/schemas/{model}"

_LIVEZ: Final = Route("/livez", "200 whenever the event loop answers.", Liveness)

_ABOUT: Final = """\
Read-only view of one kvd on a UNIX socket (`admin.sock` in the runtime directory); the permissions
of the socket are the authentication. Refusals are application/problem+json documents."""


def describe_api(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document.

    Args: version: of this kvd.
    """
    routes = (_LIVEZ, *ROUTES)
    described: list[type[Model]] = [Problem]
    described += [route.answer for route in routes if route.answer is not None]
    _, schemas = models_json_schema(
        [(model, "serialization") for model in described], ref_template=_REF
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvd admin API", "version": version, "description": _ABOUT},
        "paths": {route.path: {"get": _operation(route)} for route in routes},
        "components": {"schemas": schemas["$defs"]},
    }


def _operation(route: Route) -> dict[str, Any]:
    parameters = [_version_header(), *(_parameter(parameter) for parameter in route.parameters)]
    if route.path.startswith(STORY_PREFIX):
        parameters.insert(0, _story_id())
    responses: dict[str, Any] = {"200": _response(route, route.summary)}
    for status, meaning in (route.also or {}).items():
        responses[str(status)] = _response(route, meaning) if status == 503 else _refusal(meaning)
    responses["default"] = _refusal("Refused; the document says why and what to do.")
    name = route.path.strip("/").removeprefix("v1/").partition("/")[0].replace(".", "_")
    return {
        "operationId": name,
        "summary": route.summary,
        "parameters": parameters,
        "responses": responses,
    }


def _response(route: Route, meaning: str) -> dict[str, Any]:
    if route.answer is not None:
        ref = _REF.format(model=route.answer.__name__)
        content: dict[str, Any] = {"application/json": {"schema": {"$ref": ref}}}
        if route.path.startswith(STORY_PREFIX):
            content["text/plain"] = {"schema": {"type": "string"}}
    elif route.path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": {"type": "object"}}}
    return {"description": meaning, "content": content}


def _refusal(meaning: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=Problem.__name__)}
    return {"description": meaning, "content": {PROBLEM_TYPE: {"schema": schema}}}


def _parameter(parameter: Parameter) -> dict[str, Any]:
    if parameter.maximum:
        schema: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": parameter.maximum}
    else:
        schema = {"type": "string"}
    if parameter.choices:
        schema["enum"] = list(parameter.choices)
    if parameter.default:
        schema["default"] = parameter.default
    return {
        "name": parameter.name,
        "in": "query",
        "required": False,
        "description": parameter.description,
        "schema": schema,
    }


def _story_id() -> dict[str, Any]:
    return {
        "name": "id",
        "in": "path",
        "required": True,
        "description": "A slot (`engine/member#incarnation/slot3@7`), a request, `block12`, a "
        "transfer, a member, or a part of such a name that ends where one of its parts ends.",
        "schema": {"type": "string"},
    }


def _version_header() -> dict[str, Any]:
    return {
        "name": VERSION_HEADER,
        "in": "header",
        "required": False,
        "description": "Version of the client; the answer carries that of kvd.",
        "schema": {"type": "string"},
    }
