"""A server and somebody who talks to it, in one loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from kvd.server.admin import AdminServer
from tests.unit.server.fake_node import FakeNode


def serve(
    node: FakeNode, directory: Path, talk: Callable[[aiohttp.ClientSession], Awaitable[None]]
) -> None:
    """Run a server and something that talks to it, each in the same loop."""

    async def main() -> None:
        server = AdminServer(node, directory / "admin.sock")
        await server.start()
        connector = aiohttp.UnixConnector(str(directory / "admin.sock"))
        try:
            async with aiohttp.ClientSession("http://kvd", connector=connector) as session:
                await talk(session)
        finally:
            await server.stop()

    asyncio.run(main())


async def get(session: aiohttp.ClientSession, path: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    async with session.get(path) as response:
        assert response.headers["X-Kvd-Version"] == "0.1.0"
        return response.status, response.content_type, await response.text()
