"""The reference model's tests need torch, and one thread of it: the tests share the cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.capabilities import need_module

if TYPE_CHECKING:
    from engine_shim.reference.model import SparseModel
    from tests.unit.reference.cache_rig import Rig, Truth

torch = need_module("torch", "pip install 'kvd[engine]'")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch use one thread, as ranks that share a host do."""
    from engine_shim.reference.threads import configure_threads

    before = torch.get_num_threads()
    configure_threads(1)
    yield
    configure_threads(before)


@pytest.fixture(scope="session")
def model(one_thread: None) -> SparseModel:
    """Give the model of unit tests."""
    from engine_shim.reference.config import tiny
    from engine_shim.reference.model import SparseModel

    return SparseModel(tiny())


@pytest.fixture(scope="session")
def truth(model: SparseModel) -> Truth:
    """Give what is right when rows are read natively."""
    from tests.unit.reference.cache_rig import Truth

    return Truth(model, native=True)


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Make rigs whose rows are read natively; they are closed at the end."""
    from tests.unit.reference.cache_rig import Rig

    made: list[Rig] = []

    def make(*args: Any, **options: Any) -> Rig:
        made.append(Rig(*args, native=True, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
