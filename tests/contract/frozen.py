"""Example frames that are kept as bytes, and how one is added.

`python -m tests.contract.frozen` appends an example of every message that has none yet to
wire_frames.json: one with every field (`full`), and one with those fields only that its first
version had (`bare`); and to wire_fields.json the names of the fields in their order, which the
bytes do not show. What is in the files is never rewritten: it is what older kvds and engines say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast, get_args

import msgpack  # type: ignore[import-untyped]
import msgspec

from kvd.wire import attach, messages, peer_messages, slot_items
from kvd.wire.codec import (
    Codec,
    attach_reply_codec,
    attach_request_codec,
    client_codec,
    consumer_codec,
    producer_codec,
    server_codec,
)

FILE: Final = Path(__file__).with_name("wire_frames.json")

FIELDS_FILE: Final = Path(__file__).with_name("wire_fields.json")

SOCKETS: Final[Mapping[str, tuple[Any, Callable[[], object]]]] = MappingProxyType(
    {
        "client": (messages.ClientFrame, client_codec),
        "server": (messages.ServerFrame, server_codec),
        "attach_request": (attach.AttachRequest, attach_request_codec),
        "attach_reply": (attach.AttachReply, attach_reply_codec),
        "to_consumer": (peer_messages.ToConsumer, consumer_codec),
        "to_producer": (peer_messages.ToProducer, producer_codec),
    }
)
"""Each direction of each socket: its messages, and the codec of kvd."""

ITEMS: Final = "slot_item"
"""Not a socket: the kinds of items in an `events` frame."""


class Frozen(NamedTuple):
    """One example: direction, tag, `full` or `bare`, and the bytes."""

    socket: str
    tag: str
    form: str
    data: bytes
    values: list[Any]


def load() -> list[Frozen]:
    """Every example in the file."""
    return [
        Frozen(row["socket"], row["tag"], row["form"], bytes.fromhex(row["hex"]), thaw(row["is"]))
        for row in json.loads(FILE.read_text(encoding="utf-8"))
    ]


def freeze(value: object) -> object:
    """Plain values as JSON has them."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"map": [[freeze(key), freeze(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [freeze(item) for item in value]
    return value


def thaw(value: Any) -> Any:
    """The opposite of `freeze`."""
    if isinstance(value, dict) and "bytes" in value:
        return bytes.fromhex(value["bytes"])
    if isinstance(value, dict):
        return {thaw(key): thaw(item) for key, item in value["map"]}
    if isinstance(value, list):
        return [thaw(item) for item in value]
    return value


def kinds() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every message and slot item that there is."""
    for name, (union, _) in SOCKETS.items():
        for kind in get_args(union):
            yield name, kind
    for kind in get_args(slot_items.SlotItem):
        yield ITEMS, kind


def structs() -> dict[str, list[str]]:
    """The fields of every message, and of whatever messages are made of, in their order."""
    found: dict[str, list[str]] = {}

    def visit(info: msgspec.inspect.Type) -> None:
        inspect = msgspec.inspect
        match info:
            case inspect.StructType(cls=kind, fields=fields):
                name = f"{kind.__module__}.{kind.__qualname__}"
                if name not in found:
                    found[name] = [field.name for field in fields]
                    for field in fields:
                        visit(field.type)
            case inspect.ListType(item_type=item) | inspect.DictType(value_type=item):
                visit(item)
            case inspect.UnionType(types=types):
                for one in types:
                    visit(one)

    for _, kind in kinds():
        visit(msgspec.inspect.type_info(kind))
    return found


def tag_of(kind: type[msgspec.Struct]) -> str:
    """The first value of a message of this kind."""
    return str(kind.__struct_config__.tag)


def codec_of(socket: str) -> Codec[Any]:
    """kvd's codec; items travel in a frame of the client's."""
    if socket == ITEMS:
        return Codec(slot_items.SlotItem, 1 << 20)
    made = SOCKETS[socket][1]
    return cast(Codec[Any], made())


# Making examples ----------------------------------------------------------------------------------


def example(kind: type[msgspec.Struct], *, full: bool) -> msgspec.Struct:
    """A message with a value in each field, or in each field that has no default."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    fields = [field for field in info.fields if full or field.required]
    return kind(*[_value(field.type, field.name, full) for field in fields])


def _value(info: msgspec.inspect.Type, name: str, full: bool) -> Any:
    """Some value of a type, the same at every run; numbers and texts differ by the field."""
    inspect = msgspec.inspect
    number = sum(name.encode())
    match info:
        case inspect.IntType(ge=low):
            return number if low is not None else -1
        case inspect.BoolType():
            return number % 2 == 0
        case inspect.FloatType():
            return 0.5
        case inspect.StrType():
            return name[:64]
        case inspect.BytesType(min_length=low, max_length=high):
            size = low or min(high or 32, 32)
            return bytes((number + at) % 256 for at in range(size))
        case inspect.ListType(item_type=item):
            return [_value(item, f"{name}{at}", full) for at in range(2 if full else 1)]
        case inspect.DictType(key_type=key, value_type=item):
            return {_value(key, name, full): _value(item, name, full)}
        case inspect.TupleType(item_types=items):
            return tuple(_value(item, f"{name}{at}", full) for at, item in enumerate(items))
        case inspect.StructType(cls=kind):
            return example(kind, full=full)
        case inspect.UnionType(types=types):
            some = [one for one in types if not isinstance(one, inspect.NoneType)]
            return _value(some[0], name, full) if full or len(some) == len(types) else None
    raise AssertionError(info)


def bare(message: msgspec.Struct, socket: str) -> list[Any]:
    """The plain values of a message without the fields that have a default."""
    info = msgspec.inspect.type_info(type(message))
    assert isinstance(info, msgspec.inspect.StructType)
    required = sum(field.required for field in info.fields)
    return plain(message, socket)[: 1 + required]


def plain(message: msgspec.Struct, socket: str) -> list[Any]:
    """The plain values of a message, tag first, as another library reads them."""
    data = codec_of(socket).encode(message)
    values = msgpack.unpackb(data, strict_map_key=False)
    assert isinstance(values, list)
    return values


def main() -> None:
    """Append what is missing."""
    rows = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
    known = {(row["socket"], row["tag"]) for row in rows}
    for socket, kind in kinds():
        if (socket, tag_of(kind)) in known:
            continue
        for form in ("full", "bare"):
            message = example(kind, full=form == "full")
            values = plain(message, socket) if form == "full" else bare(message, socket)
            rows.append(
                {
                    "socket": socket,
                    "tag": tag_of(kind),
                    "form": form,
                    "hex": msgpack.packb(values).hex(),
                    "is": freeze(values),
                }
            )
    lines = ",\n".join(json.dumps(row) for row in rows)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    fields = json.loads(FIELDS_FILE.read_text(encoding="utf-8")) if FIELDS_FILE.exists() else {}
    fields = structs() | fields
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(fields[name])}" for name in fields)
    FIELDS_FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
