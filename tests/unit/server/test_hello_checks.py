"""What a hello says of its engine for people is bounded, and a wrong one is named."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.config.model import Config, StoreConfig
from kvd.core.errors import KvdError
from kvd.server.hello_checks import about_of, check_hello, store_of
from kvd.server.sessions import MemberSession
from kvd.wire import messages as msg
from tests.unit.server.fake_node import ref

LONG = "x" * 200


def hello(**changes: Any) -> msg.Hello:
    """The hello of a scheduler without slots."""
    plain = msg.Hello(1, b"", 1000, 1, 1, True, -1, 1, 0, 0, False, b"", None, None)
    return msg.Hello(*[changes.get(name, getattr(plain, name)) for name in plain.__struct_fields__])


def session() -> MemberSession:
    return MemberSession(b"t", 1, 1, -1, None, 0, 0, ref())


def check(frame: msg.Hello) -> None:
    check_hello(session(), frame, Config())


# What it says of itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "detail"),
    [
        ({f"k{n}": "" for n in range(17)}, "about has 17 entries, over the limit of 16"),
        ({"a": "", "why": LONG + "y"}, "about 'why' has 201 characters, over the limit of 200"),
        ({"a\nb": ""}, "about has the key 'a\\nb', which is not 1 to 128 letters"),
    ],
)
def test_too_much_is_refused_with_its_name(about: dict[str, str], detail: str) -> None:
    with pytest.raises(KvdError) as caught:
        check(hello(about=about))
    error = caught.value
    assert error.code == "frame_malformed"
    assert error.context["detail"].startswith(detail)


def test_as_much_as_may_be_is_taken() -> None:
    check(hello(about={f"{n:0128}": "é" * 200 for n in range(16)}))
    check(hello())


def test_what_would_not_print_does_not_reach_a_terminal() -> None:
    about = {"offload": "off\x1b[31m\r\n\x9b2J\u202e", "model": "größer \u4e2d"}
    check(hello(about=about))
    assert about_of(hello(about=about)) == {
        "offload": "off?[31m???2J?",
        "model": "größer \u4e2d",
    }


# The store that it asks for -----------------------------------------------------------------------

STORES = Config(store=StoreConfig(names=("local", "fast"), default="fast"))


@pytest.mark.parametrize(("asked", "used"), [("", "fast"), ("local", "local"), ("fast", "fast")])
def test_stores_that_there_are(asked: str, used: str) -> None:
    assert store_of(session(), hello(store=asked), STORES) == used


@pytest.mark.parametrize("asked", ["Local", "local ", "slow", "x" * 256])
def test_a_store_that_there_is_not_is_refused_with_those_that_there_are(asked: str) -> None:
    with pytest.raises(KvdError) as caught:
        store_of(session(), hello(store=asked), STORES)
    assert str(caught.value) == (
        f"store_unknown: engine 'e0' asks for store '{asked}', this node has local, fast. "
        "Add it to store.names in kvd.toml, or take `backend` out of the engine's connector."
    )


def test_the_name_of_a_store_that_would_not_print_is_shown_escaped() -> None:
    with pytest.raises(KvdError) as caught:
        store_of(session(), hello(store="\x1b[2J\n"), STORES)
    assert str(caught.value).isprintable()
