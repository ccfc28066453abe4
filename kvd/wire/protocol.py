"""Versions, limits and names that both ends of every socket must agree on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta

PROTOCOL: Final = 1
"""The version that this code speaks."""

PROTOCOL_MIN: Final = 1
"""The oldest version that this code still understands (N - 1, once there is one)."""

FRAME_BYTES_MAX: Final = 4 << 20
"""Largest frame on engine.sock and between kvds."""

ATTACH_BYTES_MAX: Final = 128 << 10
"""Largest message on attach.sock."""

TOKEN_BYTES: Final = 16
BOOT_ID_BYTES: Final = 16
DIGEST_BYTES: Final = 32

ATTACH_SOCKET: Final = "attach.sock"
ENGINE_SOCKET: Final = "engine.sock"
ADMIN_SOCKET: Final = "admin.sock"
HOLD_SOCKET: Final = "hold.sock"

NAME_CHARS_MAX: Final = 128
NAME_PATTERN: Final = r"^[\w.:@-]+\Z"

ABOUT_ENTRIES_MAX: Final = 16
"""Most that a member may say of itself; see `about_problem`."""

ABOUT_CHARS_MAX: Final = 200
"""Longest text of one such entry."""

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX, pattern=NAME_PATTERN)]
"""Names of engines, members, regions: letters, digits and _ . : @ -"""

RequestName = Annotated[str, Meta(min_length=1, max_length=256)]
SaverName = Annotated[str, Meta(min_length=1, max_length=64)]
OPTIONAL_NAME_CHARS_MAX: Final = 256
OptionalName = Annotated[str, Meta(max_length=OPTIONAL_NAME_CHARS_MAX)]
"""A name, or '' for none."""

TransferName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[\w-]+\Z")]
Address = Annotated[str, Meta(min_length=3, max_length=256)]
Token = Annotated[bytes, Meta(max_length=TOKEN_BYTES)]
BootId = Annotated[bytes, Meta(min_length=BOOT_ID_BYTES, max_length=BOOT_ID_BYTES)]
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
Unsigned = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


def agree(theirs_min: int, theirs_max: int) -> int | None:
    """The highest version that both sides speak, None when there is none."""
    version = min(PROTOCOL, theirs_max)
    return version if version >= max(PROTOCOL_MIN, theirs_min) else None


def about_problem(about: Mapping[str, str]) -> str:
    """What is wrong with what a member says of itself, '' when nothing is."""
    if len(about) > ABOUT_ENTRIES_MAX:
        return f"about has {len(about)} entries, over the limit of {ABOUT_ENTRIES_MAX}"
    for key, text in about.items():
        if len(key) > NAME_CHARS_MAX or re.match(NAME_PATTERN, key) is None:
            rule = f"1 to {NAME_CHARS_MAX} letters, digits and _ . : @ -"
            return f"about has the key {key[:NAME_CHARS_MAX]!r}, which is not {rule}"
        if len(text) > ABOUT_CHARS_MAX:
            return f"about {key!r} has {len(text)} characters, over the limit of {ABOUT_CHARS_MAX}"
    return ""
