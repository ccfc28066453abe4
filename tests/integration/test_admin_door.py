"""The first moments of the admin socket: /livez answers before anything is loaded."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import aiohttp
import pytest

from kvd import __version__
from kvd.server import admin, doorman
from kvd.server.admin import AdminServer
from kvd.server.models import Readiness
from kvd.server.node_view import Phase
from tests.integration.admin_talk import get, serve
from tests.unit.server.fake_node import FakeNode


def test_livez_answers_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading hangs: /livez answers all the same, the rest waits."""
    loaded = hang_loading(monkeypatch)

    async def talk(session: aiohttp.ClientSession) -> None:
        waiting = [asyncio.ensure_future(get(session, "/v1/status")) for _ in range(3)]
        for _ in range(3):
            assert await get(session, "/livez") == (200, "application/json", '{"alive":true}')
        assert not any(one.done() for one in waiting)
        loaded.set()
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 3
        assert await get(session, "/livez") == (200, "application/json", '{"alive":true}')

    serve(FakeNode(), tmp_path, talk)


def hang_loading(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the loading of the server wait until the event is set."""
    loaded = threading.Event()
    load = admin._preload

    def slow() -> None:
        assert loaded.wait(30)
        load()

    monkeypatch.setattr(admin, "_preload", slow)
    return loaded


def test_what_is_sent_in_pieces_before_anything_is_loaded_is_answered_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = hang_loading(monkeypatch)

    async def main() -> None:
        server = AdminServer(FakeNode(), tmp_path / "admin.sock")
        await server.start()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "admin.sock")
        silent = await asyncio.open_unix_connection(tmp_path / "admin.sock")
        gone = await asyncio.open_unix_connection(tmp_path / "admin.sock")
        gone[1].close()
        writer.write(b"GET /livez HTTP/1.1\r\n")
        await asyncio.to_thread(alive, tmp_path / "admin.sock")
        loaded.set()
        await server.opened()
        writer.write(b"Host: kvd\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        silent[1].write(b"GET /livez HTTP/1.1\r\nHost: kvd\r\n\r\n")
        assert (await silent[0].readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        silent[1].close()
        await server.stop()

    asyncio.run(main())


def alive(path: Path) -> None:
    """Ask /livez and read until the answer's end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: kvd\r\n\r\n")
        answer = b""
        while part := connection.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b'{"alive":true}')


def test_too_many_that_wait_at_the_door_are_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorman, "KEPT_MAX", 3)
    loaded = hang_loading(monkeypatch)

    async def main() -> None:
        server = AdminServer(FakeNode(), tmp_path / "admin.sock")
        await server.start()
        kept = [await asyncio.open_unix_connection(tmp_path / "admin.sock") for _ in range(3)]
        reader, writer = await asyncio.open_unix_connection(tmp_path / "admin.sock")
        assert await reader.read() == b""
        writer.close()
        loaded.set()
        await server.opened()
        for reader, writer in kept:
            writer.write(b"GET /livez HTTP/1.1\r\nHost: kvd\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
        await server.stop()

    asyncio.run(main())


def test_a_server_that_cannot_be_loaded_hangs_up_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ImportError("no such library")

    monkeypatch.setattr(admin, "_preload", broken)

    async def main() -> None:
        server = AdminServer(FakeNode(), tmp_path / "admin.sock")
        await server.start()
        with pytest.raises(ImportError, match="no such library"):
            await server.opened()
        with pytest.raises(ImportError, match="no such library"):
            await server.stop()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_readyz_says_starting_and_percent_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is a node it is 0 percent; then what the node says; ready is not guessed."""
    loaded = hang_loading(monkeypatch)

    async def talk_early() -> None:
        server = AdminServer(None, tmp_path / "admin.sock", __version__)
        await server.start()
        connector = aiohttp.UnixConnector(str(tmp_path / "admin.sock"))
        async with aiohttp.ClientSession("http://kvd", connector=connector) as session:
            status, kind, text = await get(session, "/readyz")
            assert (status, kind) == (503, "application/json")
            said = Readiness.model_validate_json(text)
            assert (said.ready, said.phase, said.percent) == (False, "starting", 0)
            assert [reason.code for reason in said.reasons] == ["starting"]
            node = FakeNode()
            node.the_phase = Phase("starting", 40, "populates the pool")
            server.show(node)
            early = Readiness.model_validate_json((await get(session, "/readyz"))[2])
            assert early.percent == 40
            loaded.set()
            await server.opened()
            late = Readiness.model_validate_json((await get(session, "/readyz"))[2])
            assert late == early
        await server.stop()

    asyncio.run(talk_early())


def test_a_server_that_was_never_shown_a_node_stops(tmp_path: Path) -> None:
    async def main() -> None:
        server = AdminServer(None, tmp_path / "admin.sock", __version__)
        await server.start()
        await server.stop()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []
