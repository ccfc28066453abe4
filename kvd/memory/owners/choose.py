"""Which owner a daemon gets."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Literal

from kvd.core.errors import LocalError
from kvd.memory.owners.base import MemoryOwner, NoOwner, close_all
from kvd.memory.owners.fdstore import FdStore
from kvd.memory.owners.hold_client import HolderOwner

OwnerChoice = Literal["auto", "fdstore", "holder", "none"]


def find_owner(choice: OwnerChoice, hold_socket: Path, ttl_ns: int) -> tuple[MemoryOwner, str]:
    """As `choose_owner`, from this process's environment; `auto` settles for nobody in the end.

    Returns: the owner, and why it is not a better one, '' when nothing is amiss.
    Raises: LocalError(owner_unavailable): one that was asked for by name cannot be had.
    """
    try:
        owner = choose_owner(choice, hold_socket, ttl_ns / 1e9, os.environ)
    except LocalError as error:
        if choice != "auto":
            raise
        return NoOwner(), f"the pool ends with kvd: {error.what}"
    if choice == "none" and hold_socket.exists():
        return owner, f"a holder at {hold_socket} still has memory of an earlier kvd: end it"
    return owner, ""


def find_another(
    choice: OwnerChoice, hold_socket: Path, ttl_ns: int, kept: Mapping[str, int]
) -> MemoryOwner:
    """As `choose_owner`, after the owner has gone; the new one is given everything at once.

    Args: kept: descriptors by name, the caller's.
    Raises: LocalError(owner_unavailable).
    """
    owner = choose_owner(choice, hold_socket, ttl_ns / 1e9, os.environ)
    try:
        close_all(owner.take())  # of nobody: one kvd holds this runtime directory
        for name, fd in kept.items():
            owner.keep(name, fd)
        owner.confirm()
    except LocalError:
        owner.close()
        raise
    return owner


def choose_owner(
    choice: OwnerChoice, hold_socket: Path, ttl_s: float, env: MutableMapping[str, str]
) -> MemoryOwner:
    """Connect to the owner that the configuration names.

    `auto` takes, in this order: the descriptor store of a systemd that keeps it over a stop (254
    and later); a holder that runs; the descriptor store of an older systemd; a holder of its own.

    Args:
        hold_socket: where a holder listens, or will.
        ttl_s: how long a holder that is started here keeps memory without a daemon.
        env: the environment; what it says about passed descriptors is used up.

    Raises: LocalError(owner_unavailable).
    """
    under_systemd = bool(env.get("NOTIFY_SOCKET"))
    if choice == "none":
        return NoOwner()
    if choice == "fdstore" or (choice == "auto" and under_systemd and "FDSTORE" in env):
        return FdStore(env, os.getpid())
    running = HolderOwner.connect(hold_socket, ttl_s)
    if running is not None:
        return running
    if not under_systemd:
        return HolderOwner.start(hold_socket, ttl_s)
    if choice == "auto":
        return FdStore(env, os.getpid())
    # A holder that is started here would be in the service's control group, and die with it.
    raise LocalError(
        "owner_unavailable",
        owner=f"the holder at {hold_socket}",
        detail="it does not run: systemctl enable --now kvd-hold.service",
    )
