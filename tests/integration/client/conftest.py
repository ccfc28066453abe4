"""Daemons, and clients of them."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.client import ClientOptions, KvdClient, MemberIdentity
from kvd.wire.layout import BlockLayoutSpec
from tests.integration.client.rig import LAYOUT, Connect
from tests.integration.daemon import Daemon


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    """A directory with a short path, for runtime directories."""
    with tempfile.TemporaryDirectory(prefix="kvdi-", dir="/tmp") as name:
        yield Path(name)


def settings_of_tests() -> dict[str, str]:
    """kvd asks early about what takes long; no engine ever leaves, so many may come."""
    return {
        "release__compute_deadline": "100ms",
        "release__query_interval": "10ms",
        "limits__engines": "64",
    }


@pytest.fixture(scope="module")
def shared(short: Path) -> Iterator[Daemon]:
    """A daemon for all tests that leave it alone."""
    made = Daemon(short / "shared", **settings_of_tests())
    made.start()
    yield made
    made.close()


@pytest.fixture
def daemon(short: Path) -> Iterator[Daemon]:
    """A daemon that a test may kill."""
    made = Daemon(short / "own", **settings_of_tests())
    made.start()
    yield made
    made.close()


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Open clients of one daemon; each test has an engine of its own."""
    kvd = request.getfixturevalue("daemon" if "daemon" in request.fixturenames else "shared")
    own = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    clients: list[KvdClient] = []

    def connect(
        engine: str = own,
        num_slots: int = 8,
        layout: BlockLayoutSpec = LAYOUT,
        rank: int = 0,
        tp_size: int = 1,
    ) -> KvdClient:
        identity = MemberIdentity(
            engine,
            f"worker{rank}",
            is_scheduler=rank == 0,
            rank=rank,
            tp_size=tp_size,
            contributes=rank == 0,
            layout=layout,
            num_slots=num_slots,
        )
        options = ClientOptions(deadline_s=5.0, spin_us=0)
        client = KvdClient(identity, str(kvd.directory), options)
        clients.append(client)
        return client.open()

    yield connect
    for client in clients:
        client.close()
