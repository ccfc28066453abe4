"""What a hello says of its engine for people is bounded, and a wrong one is named."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.config.model import Config
from kvd.core.errors import KvdError
from kvd.server.hello_checks import check_hello
from kvd.server.sessions import MemberSession
from kvd.wire import messages as msg
from tests.unit.server.fake_node import ref

LONG = "x" * 200


def hello(**changes: Any) -> msg.Hello:
    """The hello of a scheduler without slots."""
    plain = msg.Hello(1, b"", 1000, 1, 1, True, -1, 1, 0, 0, False, b"", None, None)
    return msg.Hello(*[changes.get(name, getattr(plain, name)) for name in plain.__struct_fields__])


def check(frame: msg.Hello, config: Config | None = None) -> None:
    session = MemberSession(b"t", 1, 1, -1, None, 0, 0, ref())
    check_hello(session, frame, config or Config())


def refusal(frame: msg.Hello, config: Config | None = None) -> KvdError:
    with pytest.raises(KvdError) as caught:
        check(frame, config)
    return caught.value


@pytest.mark.parametrize(
    ("about", "detail"),
    [
        ({f"k{n}": "" for n in range(17)}, "about has 17 entries, over the limit of 16"),
        ({"a": "", "why": LONG + "y"}, "about 'why' has 201 characters, over the limit of 200"),
        ({"a\nb": ""}, "about has the key 'a\\nb', which is not 1 to 128 letters"),
    ],
)
def test_too_much_is_refused_with_its_name(about: dict[str, str], detail: str) -> None:
    error = refusal(hello(about=about))
    assert error.code == "frame_malformed"
    assert error.context["detail"].startswith(detail)


def test_as_much_as_may_be_is_taken() -> None:
    check(hello(about={f"{n:0128}": "é" * 200 for n in range(16)}))
    check(hello(about={"why": "\x1b[31m\n"}))
    check(hello())
