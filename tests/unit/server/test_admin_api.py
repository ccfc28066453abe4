"""Parameters of the admin API, its description, and the order of requests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.core.errors import CATALOGUE, KvdError
from kvd.server.api import WAITING_MAX, Api, prepare
from kvd.server.models import Model, Problem, Status
from kvd.server.openapi import describe_api
from kvd.server.problems import ADMIN_ERRORS, method_not_allowed, problem_document
from kvd.server.routes import ROUTES, Route
from kvd.server.sliced import Work, run_now
from tests.unit.server.fake_node import FakeNode

ROOT = Path(__file__).parents[3]


def route(path: str) -> Route:
    return next(found for found in ROUTES if found.path == path)


@pytest.mark.parametrize(
    ("path", "given", "what"),
    [
        ("/v1/slots", {"limit": "x"}, "parameter limit: 'x' is not a whole number."),
        ("/v1/slots", {"limit": ""}, "parameter limit: '' is not a whole number."),
        ("/v1/slots", {"limit": "0"}, "parameter limit: '0' is out of range."),
        ("/v1/slots", {"limit": "501"}, "parameter limit: '501' is out of range."),
        ("/v1/slots", {"limit": "-1"}, "parameter limit: '-1' is not a whole number."),
        ("/v1/slots", {"limit": "１"}, "parameter limit: '１' is not a whole number."),
        ("/v1/slots", {"limit": "9" * 5000}, f"parameter limit: '{'9' * 40}' is not a whole"),
        ("/v1/slots", {"state": "gone"}, "parameter state: 'gone' is not known."),
        ("/v1/blocks", {"state": "Ready"}, "parameter state: 'Ready' is not known."),
        ("/v1/slots", {"engine": ""}, "parameter engine: it is empty or too long."),
        ("/v1/slots", {"engine": "e" * 513}, "parameter engine: it is empty or too long."),
        ("/v1/slots", {"lim": "1"}, "parameter lim: it is not known."),
        ("/v1/status", {"x": "1"}, "parameter x: it is not known."),
        ("/v1/story/{id}", {"format": "xml"}, "parameter format: 'xml' is not known."),
    ],
)
def test_bad_parameters_are_refused_by_name(path: str, given: dict[str, str], what: str) -> None:
    with pytest.raises(KvdError) as caught:
        route(path).read(given)
    assert caught.value.code == "parameter_invalid"
    assert caught.value.spec.status == 400
    assert caught.value.what.startswith(what)
    assert caught.value.remedy.endswith(".")


def test_what_is_not_given_has_its_default() -> None:
    assert route("/v1/blocks").read({}) == {
        "limit": 100,
        "after": "",
        "engine": "",
        "state": "used",
    }
    assert route("/v1/slots").read({"limit": "500", "state": "held"})["limit"] == 500


def test_unknown_paths_are_not_found() -> None:
    async def main() -> None:
        api = Api(FakeNode())
        for path in ("/", "/v1", "/v1/story/", "/v1/story", "/v1/status/", "/V1/status"):
            with pytest.raises(KvdError) as caught:
                await api.answer(path, {})
            assert caught.value.code == "not_found"
            assert "/openapi.json" in caught.value.remedy

    asyncio.run(main())


def test_too_many_requests_at_once_are_answered_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(work: Work[Model]) -> Model:
        await asyncio.sleep(0)  # as long work does between two slices
        return run_now(work)

    monkeypatch.setattr("kvd.server.api.run_sliced", slow)

    async def main() -> tuple[int, int]:
        api = Api(FakeNode())
        asked = [api.answer("/v1/status", {}) for _ in range(WAITING_MAX + 3)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        busy = [e for e in ended if isinstance(e, KvdError) and e.code == "busy"]
        assert (await api.answer("/v1/status", {})).status == 200
        return len(ended) - len(busy), len(busy)

    assert asyncio.run(main()) == (WAITING_MAX, 3)


def test_admin_codes_are_no_codes_of_the_catalogue() -> None:
    assert not set(ADMIN_ERRORS) & set(CATALOGUE)


def test_a_problem_has_everything_that_its_model_says() -> None:
    problem = Problem.model_validate(problem_document(method_not_allowed("POST", "/x", ["GET"])))
    assert (problem.type, problem.status) == ("urn:kvd:error:method_not_allowed", 405)
    assert (problem.title, problem.code) == ("method not allowed", "method_not_allowed")
    assert problem.detail == "/x cannot be asked with POST."
    assert problem.remedy.startswith("Use GET")


# Description --------------------------------------------------------------------------------------


def test_the_description_names_every_path_and_parameter() -> None:
    document = describe_api("1.2.3")
    assert document["openapi"].startswith("3.1")
    assert document["info"]["version"] == "1.2.3"
    assert set(document["paths"]) == {"/livez", *(found.path for found in ROUTES)}
    for found in ROUTES:
        operation = document["paths"][found.path]["get"]
        told = {p["name"]: p for p in operation["parameters"]}
        assert {parameter.name for parameter in found.parameters} <= set(told)
        assert all(p["description"] for p in told.values())
        assert operation["summary"]
        assert "default" in operation["responses"]
    limit = document["paths"]["/v1/slots"]["get"]["parameters"][1]
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": 500, "default": 100}
    assert document["paths"]["/v1/story/{id}"]["get"]["parameters"][0]["in"] == "path"
    assert "503" in document["paths"]["/readyz"]["get"]["responses"]


def test_every_reference_of_the_description_leads_somewhere() -> None:
    text = json.dumps(describe_api("1"))
    schemas = json.loads(text)["components"]["schemas"]
    for part in text.split('"$ref": "')[1:]:
        path = part.partition('"')[0]
        assert path.removeprefix("#/components/schemas/") in schemas
    assert set(schemas["Status"]["properties"]) == set(Status.model_fields)
    assert "description" in schemas["Status"]["properties"]["degraded"]


def test_operations_have_names_of_their_own() -> None:
    paths = describe_api("1")["paths"].values()
    names = [path["get"]["operationId"] for path in paths]
    assert sorted(names) == sorted(set(names))
    assert "status" in names


# Loading ------------------------------------------------------------------------------------------


def test_prepared_models_need_not_be_built_by_a_request() -> None:
    prepare()
    assert Status.__pydantic_complete__


def test_what_answers_the_first_probe_loads_little() -> None:
    code = (
        "import sys, kvd.server.admin; "
        "print(*sorted({'aiohttp', 'pydantic', 'prometheus_client', 'structlog', 'rich', 'zmq', "
        "'kvd.core.state', 'kvd.server.views'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
