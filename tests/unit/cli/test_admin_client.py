"""The client: whoever it meets at the other end, it ends soon and says what is wrong."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from kvd.cli.client import AdminClient, RefusedError
from kvd.core.errors import KvdError
from tests.unit.cli.stub_kvd import Respond, StubKvd, answer, problem

READY = {"ready": True, "phase": "ready", "percent": 100, "detail": "", "reasons": []}


def always(data: bytes) -> Respond:
    return lambda _: data


def failure(call: Callable[[], object]) -> KvdError:
    with pytest.raises(KvdError) as caught:
        call()
    return caught.value


# Nobody there, or somebody else -------------------------------------------------------------------


def test_a_socket_that_is_not_there(tmp_path: Path) -> None:
    start = time.monotonic()
    error = failure(AdminClient(tmp_path / "admin.sock").status)
    assert time.monotonic() - start < 2
    assert error.code == "unreachable"
    assert error.what == f"cannot reach kvd at {tmp_path}/admin.sock: there is no such socket."
    assert "Is the daemon running?" in error.remedy


def test_a_socket_that_nobody_listens_on(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "admin.sock"))
    error = failure(AdminClient(tmp_path / "admin.sock").status)
    assert (error.code, "nobody listens there" in error.what) == ("unreachable", True)


def test_a_file_that_is_no_socket(tmp_path: Path) -> None:
    (tmp_path / "admin.sock").write_text("")
    assert failure(AdminClient(tmp_path / "admin.sock").status).code == "unreachable"


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    error = failure(AdminClient(tmp_path / ("x" * 200)).status)
    assert (error.code, "too long" in error.what) == ("unreachable", True)


def test_a_daemon_that_hangs(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "admin.sock"))
        silent.listen()
        with AdminClient(tmp_path / "admin.sock", answer_seconds=0.05) as client:
            error = failure(client.status)
    assert error.code == "unreachable"
    assert "did not answer within 0.05 s" in error.what


def test_a_queue_that_is_full(tmp_path: Path) -> None:
    """Nobody accepts: the kernel makes us wait for the connection itself."""
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as first:
        full.bind(str(tmp_path / "admin.sock"))
        full.listen(0)
        first.connect(str(tmp_path / "admin.sock"))
        start = time.monotonic()
        error = failure(AdminClient(tmp_path / "admin.sock").status)
    assert error.code == "unreachable"
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("data", "code", "what"),
    [
        (b"", "unreachable", "it closed the connection"),
        (b"220 mail.example SMTP\r\n", "unreachable", "what answers there is not kvd"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "unreachable", "cut off"),
        (answer(b"<html>", 200), "protocol_mismatch", "0.1.0"),
        (answer(b"gateway", 502, "text/plain"), "protocol_mismatch", "0.1.0"),
        (answer({"ready": "perhaps"}), "protocol_mismatch", "0.1.0"),
        (answer({}, 404), "protocol_mismatch", "0.1.0"),
    ],
)
def test_answers_that_make_no_sense(data: bytes, code: str, what: str, tmp_path: Path) -> None:
    def respond(_: str) -> bytes:
        return data

    with StubKvd(tmp_path / "s", respond, requests_per_connection=1) as stub:
        with AdminClient(stub.path) as client:
            error = failure(client.readiness)
        assert error.code == code
        assert what in error.what


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "status"), [("not_found", 404), ("invented_tomorrow", 418)])
def test_refusals_keep_their_code_and_sentences(code: str, status: int, tmp_path: Path) -> None:
    with (
        StubKvd(tmp_path / "s", always(problem(code, status))) as stub,
        AdminClient(stub.path) as client,
        pytest.raises(RefusedError) as caught,
    ):
        client.status()
    error = caught.value
    assert (error.code, error.spec.status) == (code, status)
    assert error.what == f"it is {code} {{really}}."
    assert error.remedy == "Do something."


def test_not_ready_is_an_answer_and_no_refusal(tmp_path: Path) -> None:
    body = {**READY, "ready": False, "reasons": [{"code": "x", "what": "y", "remedy": "z"}]}
    with (
        StubKvd(tmp_path / "s", always(answer(body, 503))) as stub,
        AdminClient(stub.path) as client,
    ):
        seen = client.readiness()
    assert (seen.ready, seen.reasons[0].code) == (False, "x")


# Connections and versions -------------------------------------------------------------------------


def test_one_connection_is_kept(tmp_path: Path) -> None:
    with StubKvd(tmp_path / "s", always(answer(READY))) as stub:
        with AdminClient(stub.path) as client:
            for _ in range(5):
                assert client.readiness().ready
        assert (stub.connections, len(stub.targets)) == (1, 5)
        assert "X-Kvd-Version: 0.1.0" in stub.headers


def test_a_connection_that_was_closed_in_between_is_made_again(tmp_path: Path) -> None:
    with StubKvd(tmp_path / "s", always(answer(READY)), requests_per_connection=1) as stub:
        with AdminClient(stub.path) as client:
            for _ in range(3):
                assert client.readiness().ready
        assert stub.connections == 3


def test_a_daemon_that_went_away_in_between_is_unreachable(tmp_path: Path) -> None:
    with AdminClient(tmp_path / "s") as client:
        with StubKvd(tmp_path / "s", always(answer(READY))):
            assert client.readiness().ready
        assert failure(client.readiness).code == "unreachable"


def test_another_version_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    with (
        StubKvd(tmp_path / "s", always(answer(READY, version="9.9.9"))) as stub,
        AdminClient(stub.path, warn=told.append) as client,
    ):
        client.readiness()
        client.readiness()
        assert client.their_version == "9.9.9"
    assert len(told) == 1
    assert "9.9.9" in told[0]
    assert "0.1.0" in told[0]


def test_members_that_a_newer_kvd_adds_are_ignored(tmp_path: Path) -> None:
    with (
        StubKvd(tmp_path / "s", always(answer({**READY, "mood": "good"}))) as stub,
        AdminClient(stub.path) as client,
    ):
        assert client.readiness().ready


# Pages and names ----------------------------------------------------------------------------------


def slot(number: int) -> dict[str, object]:
    return {
        "engine": "e",
        "member": "w",
        "incarnation": "1",
        "slot": number,
        "epoch": 0,
        "state": "free",
        "layer": None,
        "saved": "none",
        "poisoned": False,
        "holds": [],
    }


def test_pages_are_followed_as_far_as_asked_for(tmp_path: Path) -> None:
    def respond(target: str) -> bytes:
        start = int(parse_qs(target.partition("?")[2]).get("after", ["-1"])[0]) + 1
        return answer({"items": [slot(start), slot(start + 1)], "next": str(start + 1)})

    with StubKvd(tmp_path / "s", respond) as stub, AdminClient(stub.path) as client:
        page = client.slots(6, state="free")
        assert [item.slot for item in page.items] == list(range(6))
        assert page.next == "5"
        assert stub.targets == [
            "/v1/slots?limit=6&state=free",
            "/v1/slots?limit=4&after=1&state=free",
            "/v1/slots?limit=2&after=3&state=free",
        ]


def test_names_are_quoted(tmp_path: Path) -> None:
    story = {"id": "x", "entries": [], "matched": 0, "searched": 0, "dropped": 0}
    with StubKvd(tmp_path / "s", always(answer(story))) as stub, AdminClient(stub.path) as client:
        client.story("a/b#1?c d", 3)
        assert stub.targets == ["/v1/story/a%2Fb%231%3Fc%20d?limit=3"]
