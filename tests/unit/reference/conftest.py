"""The reference model's tests need torch, and one thread of it: the tests share the cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.capabilities import need_module

torch = need_module("torch", "pip install 'kvd[engine]'")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch use one thread, as ranks that share a host do."""
    from engine_shim.reference.threads import configure_threads

    before = torch.get_num_threads()
    configure_threads(1)
    yield
    configure_threads(before)
