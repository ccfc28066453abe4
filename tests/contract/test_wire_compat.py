"""What older kvds and engines say is still understood, and what newer ones append is ignored.

The frozen bytes are compared with what another library reads in them, so that a change of kvd's
own codec, of a tag, of an order or of a type shows.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest

from kvd.wire.attach import Attached
from kvd.wire.codec import FrameError, client_codec
from kvd.wire.messages import Events, Hello
from kvd.wire.protocol import PROTOCOL, PROTOCOL_MIN, agree
from tests.contract.frozen import (
    FIELDS_FILE,
    ITEMS,
    SOCKETS,
    Frozen,
    codec_of,
    freeze,
    kinds,
    load,
    plain,
    structs,
    tag_of,
    thaw,
)

FROZEN = load()
LATER: list[object] = ["later", [1, {"a": None}], msgpack.ExtType(1, b"x")]

each = pytest.mark.parametrize(
    "frozen", FROZEN, ids=lambda frozen: f"{frozen.socket}-{frozen.tag}-{frozen.form}"
)


def test_every_message_has_its_examples() -> None:
    """A new one fails here: `python -m tests.contract.frozen` appends what is missing."""
    wanted = Counter((socket, tag_of(kind), form) for socket, kind in kinds() for form in FORMS)
    assert Counter((one.socket, one.tag, one.form) for one in FROZEN) == wanted


FORMS = ("full", "bare")


def test_tags_are_one_word_each_in_their_direction() -> None:
    tags = Counter((socket, tag_of(kind)) for socket, kind in kinds())
    assert max(tags.values()) == 1
    assert {socket for socket, _ in tags} == {*SOCKETS, ITEMS}


def test_fields_keep_their_places() -> None:
    """Two of one type that change places would not show in the bytes."""
    frozen = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))
    now = structs()
    assert now.keys() == frozen.keys()
    for name, fields in frozen.items():
        assert now[name][: len(fields)] == fields, name


@each
def test_another_library_reads_the_same_values(frozen: Frozen) -> None:
    values = msgpack.unpackb(frozen.data, strict_map_key=False)
    assert values == frozen.values
    assert values[0] == frozen.tag
    assert msgpack.packb(values) == frozen.data


@each
def test_kvd_reads_the_same_values(frozen: Frozen) -> None:
    """Fields that were appended since have their defaults, at every level."""
    message = codec_of(frozen.socket).decode(frozen.data)
    assert tag_of(type(message)) == frozen.tag
    assert_begins(plain(message, frozen.socket), frozen.values)
    if frozen.form == "bare":
        for field in msgspec.structs.fields(message)[len(frozen.values) - 1 :]:
            assert getattr(message, field.name) == default_of(field), field.name


def assert_begins(values: Any, old: Any) -> None:
    """Whether nested arrays have grown at their ends only."""
    if isinstance(old, list):
        assert isinstance(values, list)
        assert len(values) >= len(old)
        for value, before in zip(values, old, strict=False):
            assert_begins(value, before)
    else:
        assert values == old


def default_of(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    assert field.default is not msgspec.NODEFAULT, f"{field.name} was appended without a default"
    return field.default


@each
def test_appended_fields_are_ignored(frozen: Frozen) -> None:
    codec = codec_of(frozen.socket)
    known = codec.decode(frozen.data)
    assert codec.decode(msgpack.packb([*full_length(frozen), *LATER])) == known
    grown = grow(msgspec.to_builtins(known, builtin_types=(bytes,)), info_of(known))
    assert codec.decode(msgpack.packb(grown)) == known


def full_length(frozen: Frozen) -> list[Any]:
    """The frame with every field that there is now: what comes behind those is what is new."""
    return plain(codec_of(frozen.socket).decode(frozen.data), frozen.socket)


def info_of(message: msgspec.Struct) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(type(message))


def grow(value: Any, info: msgspec.inspect.Type) -> Any:
    """Append to every nested message, as a newer version of each would."""
    inspect = msgspec.inspect
    match info:
        case inspect.StructType(fields=fields, tag=tag):
            tags = value[:1] if tag is not None else []
            inner = zip(value[len(tags) :], fields, strict=True)
            return [*tags, *(grow(item, field.type) for item, field in inner), *LATER]
        case inspect.ListType(item_type=item):
            return [grow(one, item) for one in value]
        case inspect.DictType(value_type=item):
            return {key: grow(one, item) for key, one in value.items()}
        case inspect.UnionType(types=types) if value is not None:
            structs = [one for one in types if isinstance(one, inspect.StructType)]
            tagged = [one for one in structs if one.tag is not None and one.tag == value[0]]
            lists = [one for one in types if isinstance(one, inspect.ListType)]
            chosen = tagged or structs or lists
            return grow(value, chosen[0]) if chosen else value
    return value


@each
def test_a_frame_that_is_one_field_short_is_refused(frozen: Frozen) -> None:
    if frozen.form == "full":
        return
    with pytest.raises(FrameError) as caught:
        codec_of(frozen.socket).decode(msgpack.packb(frozen.values[:-1]))
    assert caught.value.code in ("frame_malformed", "op_unknown")


def test_items_of_another_version_in_an_events_frame() -> None:
    """An item that grew is read; an unknown one refuses its frame, under its number."""
    items = [one.values for one in FROZEN if one.socket == ITEMS]
    head = ["events", 7, b"t" * 16, 1000, b"b" * 16, 5, 0]
    frame = client_codec().decode(
        msgpack.packb([*head, [[*item, "later"] for item in grown(items)]])
    )
    assert isinstance(frame, Events)
    assert [tag_of(type(item)) for item in frame.items] == [item[0] for item in items]
    with pytest.raises(FrameError) as caught:
        client_codec().decode(msgpack.packb([*head, [["dreamt", 0, 0]]]))
    assert (caught.value.code, caught.value.request_no) == ("frame_malformed", 7)


def grown(items: list[list[Any]]) -> list[list[Any]]:
    """Items with all fields that there are now."""
    codec = codec_of(ITEMS)
    return [plain(codec.decode(msgpack.packb(item)), ITEMS) for item in items]


def test_frozen_values_survive_the_file() -> None:
    values = [b"\x00\xff", {1: b"x", "a": [None, True, 1.5]}, [], "é", -1, 1 << 64 - 1]
    assert thaw(freeze(values)) == values


# Versions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "agreed"),
    [
        ((PROTOCOL, PROTOCOL), PROTOCOL),
        ((PROTOCOL_MIN, PROTOCOL + 5), PROTOCOL),
        ((0, PROTOCOL_MIN), PROTOCOL_MIN),
        ((PROTOCOL + 1, PROTOCOL + 2), None),
        ((0, PROTOCOL_MIN - 1), None),
        ((PROTOCOL + 1, PROTOCOL), None),
    ],
)
def test_the_version_that_both_speak(theirs: tuple[int, int], agreed: int | None) -> None:
    assert agree(*theirs) == agreed


def test_an_answer_of_an_unknown_kind_is_refused_by_clients() -> None:
    with pytest.raises(FrameError) as caught:
        codec_of("server").decode(msgpack.packb(["maybe", 9, b"b" * 16]))
    assert (caught.value.code, caught.value.request_no) == ("op_unknown", 9)
    reply = codec_of("attach_reply").decode(
        msgpack.packb(["attached", 1, b"b" * 16, b"t" * 16, 0, 0, "later"])
    )
    assert reply == Attached(1, b"b" * 16, b"t" * 16, 0, 0)


# Fields that were appended ------------------------------------------------------------------------


def test_a_hello_from_before_stores_asks_for_the_default_and_says_nothing() -> None:
    (full,) = [one for one in FROZEN if (one.tag, one.form) == ("hello", "full")]
    hello = client_codec().decode(full.data)
    assert isinstance(hello, Hello)
    assert (hello.store, hello.about) == ("", {})


def test_an_older_kvd_reads_a_newer_hello_up_to_where_it_ends() -> None:
    """It has these very fields, and no others: what is behind them it skips."""
    fields = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))["kvd.wire.messages.Hello"]
    (full,) = [one for one in FROZEN if (one.tag, one.form) == ("hello", "full")]
    hello = client_codec().decode(full.data)
    newer = msgspec.structs.replace(hello, store="local", about={"offload": "off"})
    values = msgpack.unpackb(client_codec().encode(newer), strict_map_key=False)
    assert values[1 + len(fields) :] == ["local", {"offload": "off"}]
    old = msgspec.defstruct("Old", [(name, Any) for name in fields], tag="hello", array_like=True)
    read = msgspec.msgpack.decode(client_codec().encode(newer), type=old)
    assert [getattr(read, name) for name in fields] == values[1 : 1 + len(fields)]
