"""Telling a service manager where the daemon is in its life (sd_notify, without its library)."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> bool:
    """Send one state, e.g. `READY=1`. Returns whether there was anybody to tell."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(state.encode(), address)
        except OSError:
            return False
    return True
