"""The admin API over a real UNIX socket, in front of the real machine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import time
from pathlib import Path

import aiohttp
import pytest

from kvd.cli.client import AdminClient
from kvd.config.load import ConfigRow
from kvd.core import events as ev
from kvd.core.errors import KvdError
from kvd.core.ids import ReadId
from kvd.server.admin import AdminServer
from kvd.server.models import Readiness, Status
from kvd.server.models_tables import BlockPage, SlotPage
from kvd.server.node_view import Phase
from tests.integration.admin_talk import get, serve
from tests.unit.server.fake_node import SECOND, FakeNode

# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/story/nobody", 404, "not_found"),
        ("GET", "/v1/slots?limit=x", 400, "parameter_invalid"),
        ("GET", "/v1/slots?limit=1&limit=2", 400, "parameter_invalid"),
        ("GET", "/v1/slots?after=x", 400, "parameter_invalid"),
        ("POST", "/v1/status", 405, "method_not_allowed"),
        ("DELETE", "/livez", 405, "method_not_allowed"),
        ("PUT", "/nowhere", 405, "method_not_allowed"),
    ],
)
def test_refusals_are_problem_documents(
    method: str, path: str, status: int, code: str, tmp_path: Path
) -> None:
    async def talk(session: aiohttp.ClientSession) -> None:
        async with session.request(method, path) as response:
            assert response.status == status
            assert response.content_type == "application/problem+json"
            assert response.headers["X-Kvd-Version"] == "0.1.0"
            problem = await response.json(content_type=None)
        assert set(problem) == {"type", "title", "status", "detail", "code", "remedy"}
        assert (problem["code"], problem["status"]) == (code, status)
        assert problem["remedy"]
        if status == 405:
            assert response.headers["Allow"] == "GET, HEAD"

    serve(FakeNode(), tmp_path, talk)


def test_metrics_can_be_switched_off(tmp_path: Path) -> None:
    row = ConfigRow("metrics.enabled", "false", "default", False, "")

    async def talk(session: aiohttp.ClientSession) -> None:
        status, _, body = await get(session, "/metrics")
        assert status == 404
        assert "metrics.enabled" in body

    serve(FakeNode(rows=[row]), tmp_path, talk)


def test_a_taken_path_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    path.write_text("mine")

    async def main() -> None:
        server = AdminServer(FakeNode(), path)
        with pytest.raises(KvdError) as caught:
            await server.start()
        assert caught.value.code == "runtime_dir_unusable"
        assert "admin.sock" in caught.value.what
        await server.stop()

    asyncio.run(main())
    assert path.read_text() == "mine"


# Life ---------------------------------------------------------------------------------------------


def test_only_the_user_of_the_daemon_may_connect(tmp_path: Path) -> None:
    async def talk(session: aiohttp.ClientSession) -> None:
        status = (tmp_path / "admin.sock").stat()
        assert stat.S_IMODE(status.st_mode) == 0o600

    before = os.umask(0)
    try:
        serve(FakeNode(), tmp_path, talk)
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_stopping_twice_and_before_starting_is_no_error(tmp_path: Path) -> None:
    async def main() -> None:
        server = AdminServer(FakeNode(), tmp_path / "admin.sock")
        await server.stop()
        await server.start()
        await server.stop()
        await server.stop()

    asyncio.run(main())


def test_the_socket_of_a_successor_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"

    async def main() -> None:
        server = AdminServer(FakeNode(), path)
        await server.start()
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            await server.stop()
            assert path.exists()

    asyncio.run(main())


def test_a_stop_does_not_wait_for_idle_connections(tmp_path: Path) -> None:
    async def talk(session: aiohttp.ClientSession) -> None:
        await get(session, "/livez")  # the connection is kept

    start = time.monotonic()
    serve(FakeNode(), tmp_path, talk)
    assert time.monotonic() - start < 10


def test_it_answers_while_the_pool_is_populated(tmp_path: Path) -> None:
    node = FakeNode(the_phase=Phase("starting", 40, "populates the pool"), the_regions=[])

    async def talk(session: aiohttp.ClientSession) -> None:
        assert (await get(session, "/livez"))[0] == 200
        status, _, body = await get(session, "/readyz")
        seen = Readiness.model_validate_json(body)
        assert (status, seen.ready, seen.phase, seen.percent) == (503, False, "starting", 40)
        assert [reason.code for reason in seen.reasons] == ["starting"]
        status, _, body = await get(session, "/v1/status")
        assert (status, Status.model_validate_json(body).percent) == (200, 40)
        node.the_phase = Phase("ready")
        assert (await get(session, "/readyz"))[0] == 200

    serve(node, tmp_path, talk)


def test_readiness_follows_a_stuck_read(tmp_path: Path) -> None:
    """A transfer that never ends: alive, but not ready, and the status says for whom it waits."""
    node = FakeNode()
    who = node.join()
    held = node.offer(who, 1, "t1")
    node.handle(ev.ClaimCame("kvd#dead", held, ReadId("t1", 0, 0, 0), 1))

    async def talk(session: aiohttp.ClientSession) -> None:
        assert (await get(session, "/readyz"))[0] == 200
        node.time += 121 * SECOND
        assert (await get(session, "/livez"))[0] == 200
        status, _, body = await get(session, "/readyz")
        assert status == 503
        (reason,) = Readiness.model_validate_json(body).reasons
        assert reason.code == "wait_too_long"
        assert str(held) in reason.what
        wait = Status.model_validate_json((await get(session, "/v1/status"))[2]).oldest_wait
        assert wait is not None
        assert wait.waits_for == ["read t1/L0+0.0 by kvd#dead (running)"]
        assert "read_claimed" in wait.last_event

    serve(node, tmp_path, talk)


# Answers ------------------------------------------------------------------------------------------


def test_every_path_answers(tmp_path: Path) -> None:
    node = FakeNode()
    who = node.join()
    node.fill(who, "r", 3)
    node.hold(who, 1)

    async def talk(session: aiohttp.ClientSession) -> None:
        for path, kind in (
            ("/livez", "application/json"),
            ("/readyz", "application/json"),
            ("/v1/status", "application/json"),
            ("/v1/slots?state=held", "application/json"),
            ("/v1/blocks?limit=2", "application/json"),
            ("/v1/engines", "application/json"),
            ("/v1/story/e0%2Fw0%231f%2Fslot1%400", "application/json"),
            ("/v1/story/slot1?format=text", "text/plain"),
            ("/v1/config", "application/json"),
            ("/metrics", "text/plain"),
            ("/openapi.json", "application/json"),
        ):
            status, found, body = await get(session, path)
            assert (path, status, found) == (path, 200, kind)
            assert body
        async with session.head("/livez") as response:
            assert response.status == 200
        first = await get(session, "/openapi.json")
        assert "/v1/status" in json.loads(first[2])["paths"]
        assert (await get(session, "/openapi.json")) == first
        assert "kvd_ready 1.0" in (await get(session, "/metrics"))[2]
        page = SlotPage.model_validate_json((await get(session, "/v1/slots?state=held"))[2])
        assert [slot.slot for slot in page.items] == [1]
        blocks = BlockPage.model_validate_json((await get(session, "/v1/blocks?limit=2"))[2])
        assert (len(blocks.items), blocks.next) == (2, "1")

    serve(node, tmp_path, talk)


def test_many_at_once_get_what_they_asked_for(tmp_path: Path) -> None:
    node = FakeNode()
    node.fill(node.join(), "r", 5)

    async def talk(session: aiohttp.ClientSession) -> None:
        paths = ["/v1/status", "/v1/slots", "/v1/blocks", "/metrics", "/readyz", "/livez"] * 3
        answers = await asyncio.gather(*(get(session, path) for path in paths))
        assert [status for status, _, _ in answers] == [200] * len(paths)

    serve(node, tmp_path, talk)


def test_the_client_and_the_server_agree(tmp_path: Path) -> None:
    """`AdminClient`, from a thread, over one connection for all its calls."""
    node = FakeNode()
    who = node.join()
    node.fill(who, "r", 5)
    node.hold(who, 2)

    def use(path: Path) -> None:
        with AdminClient(path) as client:
            assert client.status().pool.blocks.ready == 5
            assert client.readiness().ready
            assert [slot.slot for slot in client.slots(100).items] == [0, 1, 2, 3]
            assert [block.block for block in client.blocks(3).items] == [0, 1, 2]
            assert client.blocks(3).next == "2"
            assert [engine.engine for engine in client.engines().items] == ["e0"]
            assert client.story("e0/w0#1f/slot2@0", 10).entries[0].event == "acquired"
            assert client.config().items == []
            assert client.their_version == "0.1.0"
            with pytest.raises(KvdError) as caught:
                client.story("who/is#that?", 10)
            assert caught.value.code == "not_found"
            assert "who/is#that?" in caught.value.what

    async def talk(session: aiohttp.ClientSession) -> None:
        await asyncio.to_thread(use, tmp_path / "admin.sock")

    serve(node, tmp_path, talk)
