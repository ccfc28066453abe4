"""What every handshake begins with: the version that both sides speak."""

from __future__ import annotations

from kvd.core.errors import LocalError
from kvd.wire.protocol import PROTOCOL, PROTOCOL_MIN, agree


def agreed(theirs_min: int, theirs_max: int) -> int:
    """The protocol to be spoken with a client that speaks so old and so new ones.

    Raises: LocalError(protocol_mismatch).
    """
    protocol = agree(theirs_min, theirs_max)
    if protocol is None:
        theirs, ours = f"{theirs_min}-{theirs_max}", f"{PROTOCOL_MIN}-{PROTOCOL}"
        raise LocalError("protocol_mismatch", theirs=theirs, ours=ours)
    return protocol
