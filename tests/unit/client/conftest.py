"""A scripted kvd, and clients that are attached to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from engine_shim.client import ClientOptions, KvdClient, MemberIdentity
from tests.unit.client.fake_kvd import FakeKvd

OPTIONS: Final = ClientOptions(
    deadline_s=5.0,
    connect_deadline_s=5.0,
    reconnect_deadline_s=5.0,
    attempt_s=1.0,
    backoff_min_s=0.001,
    backoff_max_s=0.01,
)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A runtime directory with a short path."""
    short = Path("/tmp") / f"kvdc-{os.getpid()}-{tmp_path.name[-30:]}"
    short.mkdir(mode=0o700)
    yield short
    shutil.rmtree(short)


@pytest.fixture
def kvds(directory: Path) -> Iterator[list[FakeKvd]]:
    """Fakes of one directory, the present one last; a test appends successors."""
    made = [FakeKvd(directory)]
    yield made
    for fake in made:
        fake.stop()


@pytest.fixture
def kvd(kvds: list[FakeKvd]) -> FakeKvd:
    """The first life of kvd."""
    return kvds[0]


@pytest.fixture
def connect(kvds: list[FakeKvd]) -> Iterator[Callable[..., KvdClient]]:
    """Open clients with fields of identity and options replaced; they are closed at the end."""
    directory = kvds[0].directory
    clients: list[KvdClient] = []

    def connect(num_slots: int = 2, **changes: Any) -> KvdClient:
        identity = MemberIdentity("e0", "w0", rank=0, num_slots=num_slots)
        named = {name: value for name, value in changes.items() if hasattr(identity, name)}
        others = {name: value for name, value in changes.items() if name not in named}
        options = replace(OPTIONS, **others)
        client = KvdClient(replace(identity, **named), str(directory), options)
        clients.append(client)
        return client.open()

    yield connect
    for client in clients:
        client.close()
