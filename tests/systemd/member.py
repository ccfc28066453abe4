"""A member for a kvd inside a machine: `python -m tests.systemd.member fill|check COUNT`.

fill saves and commits COUNT blocks, and leaves. check looks all of them up and compares their
bytes; it prints how many are hits. Both end with an error when kvd says or holds something else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.integration.raw_frames import LAYOUT, RawMember, digest, save_block

RUNTIME_DIR: Final = Path("/run/kvd")


def stride() -> int:
    """Bytes from one block to the next."""
    done = subprocess.run(("kvctl", "status", "-o", "json"), capture_output=True, check=False)
    found = json.loads(done.stdout)["pool"]["block_bytes"]
    assert isinstance(found, int)
    return found


def content(number: int, length: int) -> bytes:
    """What is in block `number`."""
    return bytes([number + 1]) * length


def fill(member: RawMember, count: int) -> None:
    """Save and commit blocks 0 to count - 1."""
    assert member.pool is not None
    length = stride()
    for number in range(count):
        block = save_block(member, f"r{number}", number)
        member.pool.write_bytes(block * length, content(number, length))
        member.unpin(f"r{number}")


def hits(member: RawMember, count: int) -> int:
    """Look all of them up; what is found must have its bytes."""
    assert member.pool is not None
    length = stride()
    found = 0
    for number in range(count):
        for block in member.lookup(f"again{number}", digest(number)):
            assert member.pool.read_bytes(block * length, length) == content(number, length)
            found += 1
        member.unpin(f"again{number}")
    return found


def main(what: str, count: int) -> None:
    """Do one of the two."""
    with RawMember(RUNTIME_DIR, "e", num_slots=3) as member:
        member.hello(LAYOUT)
        if what == "fill":
            fill(member, count)
        print(hits(member, count))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
