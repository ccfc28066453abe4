"""`kvctl`: what it prints where, and the exit code of everything that can happen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvd.cli.kvctl import app
from kvd.server.models import Status
from kvd.server.problems import ALL_ERRORS
from kvd.server.sliced import run_now
from kvd.server.views import Watch, status
from tests.unit.cli.stub_kvd import StubKvd, answer, problem
from tests.unit.server.fake_node import WALL, FakeNode

ROOT = Path(__file__).parents[3]

EMPTY = {
    "/v1/slots": {"items": [], "next": None},
    "/v1/blocks": {"items": [], "next": None, "total": 0},
    "/v1/engines": {"items": [], "next": None},
    "/v1/config": {"items": []},
    "/v1/story/x": {"id": "x", "entries": [], "matched": 0, "searched": 0, "dropped": 0},
}


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    clean = dict.fromkeys(("KVD_RUNTIME_DIR", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"), "")
    result = CliRunner().invoke(app, list(arguments), env={**clean, **(env or {})})
    return result.exit_code, result.stdout, result.stderr


def node_status(node: FakeNode) -> bytes:
    return answer(run_now(status(node, Watch(), WALL)).model_dump_json().encode())


def quarantined() -> FakeNode:
    node = FakeNode()
    node.quarantine(node.join(), 0)
    return node


# Exit codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("slots",),
        ("blocks",),
        ("engines",),
        ("config",),
        ("story", "x"),
        ("status", "-o", "json"),
        ("status", "--watch", "0.01"),
    ],
)
def test_unreachable_is_3_with_a_hint(arguments: tuple[str, ...], tmp_path: Path) -> None:
    code, out, err = run(*arguments, "--runtime-dir", str(tmp_path))
    assert (code, out) == (3, "")
    assert err.startswith(f"kvctl: unreachable: cannot reach kvd at {tmp_path}/admin.sock:")
    assert "Is the daemon running?" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("status", "--nonsense"),
        ("status", "-o", "xml"),
        ("status", "--watch", "0"),
        ("status", "--watch", "often"),
        ("slots", "--limit", "0"),
        ("slots", "--state", "gone"),
        ("blocks", "--state", "gone"),
        ("story",),
        ("story", "x", "--limit", "501"),
    ],
)
def test_wrong_usage_is_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == 2


def test_a_refusal_is_1(tmp_path: Path) -> None:
    with StubKvd(tmp_path / "s", lambda _: problem("not_found", 404)) as stub:
        code, out, err = run("story", "x", "--socket", str(stub.path))
    assert (code, out) == (1, "")
    assert err == "kvctl: not_found: it is not_found {really}. Do something.\n"


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_degraded_node_is_4_after_printing(form: str, tmp_path: Path) -> None:
    body = node_status(quarantined())
    with StubKvd(tmp_path / "s", lambda _: body) as stub:
        code, out, err = run("status", "-o", form, "--socket", str(stub.path))
    assert (code, err) == (4, "")
    assert "slot_quarantined" in out


def test_a_node_that_is_well_or_starting_is_0(tmp_path: Path) -> None:
    from kvd.server.node_view import Phase

    for node in (FakeNode(), FakeNode(the_phase=Phase("starting", 3))):
        body = node_status(node)
        path = tmp_path / f"s{node.the_phase.name}"
        with StubKvd(path, lambda _, body=body: body) as stub:  # type: ignore[misc]
            assert run("status", "--socket", str(stub.path))[0] == 0


# Output -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["slots", "blocks", "engines", "config", "story x"])
def test_each_command_has_both_forms(command: str, tmp_path: Path) -> None:
    with StubKvd(tmp_path / "s", lambda target: answer(EMPTY[target.partition("?")[0]])) as stub:
        words = command.split()
        code, out, _ = run(*words, "-o", "json", "--socket", str(stub.path))
        assert code == 0
        assert json.loads(out) == EMPTY[stub.targets[0].partition("?")[0]]
        code, out, _ = run(*words, "--socket", str(stub.path))
        assert code == 0
        assert out.strip()
        assert "\x1b" not in out


def test_json_of_the_status_is_the_document(tmp_path: Path) -> None:
    body = node_status(FakeNode())
    with StubKvd(tmp_path / "s", lambda _: body) as stub:
        _, out, _ = run("status", "-o", "json", "--socket", str(stub.path))
    assert Status.model_validate_json(out).boot_id == "b0" * 16


def test_filters_are_passed_on(tmp_path: Path) -> None:
    with StubKvd(tmp_path / "s", lambda target: answer(EMPTY[target.partition("?")[0]])) as stub:
        at = ("--socket", str(stub.path))
        run("slots", "--engine", "e", "--member", "w", "--state", "held", "--limit", "3", *at)
        run("blocks", "--state", "all", "--after", "7", *at)
        assert stub.targets == [
            "/v1/slots?limit=3&engine=e&member=w&state=held",
            "/v1/blocks?limit=200&after=7&state=all",
        ]


def test_another_version_is_told_on_standard_error(tmp_path: Path) -> None:
    with StubKvd(tmp_path / "s", lambda _: answer(EMPTY["/v1/slots"], version="8.8.8")) as stub:
        code, out, err = run("slots", "-o", "json", "--socket", str(stub.path))
    assert code == 0
    assert json.loads(out) == EMPTY["/v1/slots"]
    assert err.startswith("kvctl: kvd is version 8.8.8")


# Which kvd ----------------------------------------------------------------------------------------


def test_the_place_may_stand_before_or_behind_the_command(tmp_path: Path) -> None:
    with StubKvd(tmp_path / "admin.sock", lambda _: answer(EMPTY["/v1/slots"])) as stub:
        for place in (("--socket", str(stub.path)), ("--runtime-dir", str(tmp_path))):
            assert run(*place, "slots")[0] == 0
            assert run("slots", *place)[0] == 0
        assert run("--socket", "/nowhere", "slots", "--runtime-dir", str(tmp_path))[0] == 0
        assert run("slots", env={"KVD_RUNTIME_DIR": str(tmp_path)})[0] == 0


def test_a_relative_place_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("status", "--runtime-dir", "here")
    assert code == 3
    assert f"{tmp_path}/here/admin.sock" in err


def test_no_place_at_all_is_unreachable_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    code, _, err = run("status")
    assert code == 3
    assert "XDG_RUNTIME_DIR is not set" in err


# Errors and help ----------------------------------------------------------------------------------


def test_every_error_code_is_explained() -> None:
    code, out, _ = run("errors")
    assert code == 0
    told = {line.split()[0] for line in out.splitlines() if line and not line.startswith(" ")}
    assert set(ALL_ERRORS) <= told
    rows = json.loads(run("errors", "-o", "json")[1])
    assert {row["code"] for row in rows} == set(ALL_ERRORS)


def test_one_error_code_is_explained_in_full() -> None:
    code, out, _ = run("errors", "pool_full")
    assert code == 0
    assert "enlarge pool.size" in out
    assert "<want> blocks asked" in out


def test_an_unknown_error_code_gets_the_nearest() -> None:
    code, out, err = run("errors", "pool_ful")
    assert (code, out) == (1, "")
    assert "did you mean pool_full?" in err


def test_help_teaches_the_exit_codes_and_every_command() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "Exit codes: 0 well, 1 refused, 2 wrong usage, 3 kvd cannot be reached" in out
    for command in ("status", "slots", "blocks", "engines", "story", "config", "errors"):
        assert f"  {command}" in out
        assert len(run(command, "--help")[1].splitlines()) > 8


def test_the_version() -> None:
    assert run("--version")[:2] == (0, "kvctl 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        ("['--version']", {"kvd.cli.client", "rich"}),
        ("['status', '--socket', '/nowhere']", {"rich"}),
    ],
)
def test_only_what_is_needed_is_loaded(arguments: str, unwanted: set[str]) -> None:
    never = {"aiohttp", "asyncio", "zmq", "structlog", "prometheus_client", "kvd.core.state"}
    code = (
        "import sys\nfrom kvd.cli.kvctl import app\n"
        f"sys.argv[1:] = {arguments}\n"
        "try: app()\nexcept SystemExit: pass\n"
        f"print('loaded', *sorted({never | unwanted!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded"


# Words --------------------------------------------------------------------------------------------


def test_a_wrong_choice_is_told_in_plain_words() -> None:
    _, _, err = run("status", "-o", "xml")
    assert "Invalid value for '--output' / '-o': 'xml' is not one of 'table', 'json'" in err


@pytest.mark.parametrize("name", ["", " "])
def test_a_story_of_nothing_is_wrong_usage(name: str) -> None:
    code, out, err = run("story", name)
    assert (code, out) == (2, "")
    assert "Invalid value for ID: it is empty" in err


def test_placeholders_look_alike_in_both_forms() -> None:
    for code in ("pool_full", "parameter_invalid", "not_found"):
        table = " ".join(run("errors", code)[1].split())
        (row,) = json.loads(run("errors", code, "-o", "json")[1])
        assert "{" not in row["what"] + row["remedy"]
        assert f"what {row['what']}" in table
        assert f"remedy {row['remedy']}" in table
