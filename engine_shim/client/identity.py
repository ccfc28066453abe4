"""Who a member is, and how its memory is laid out: what it says at attach and in its hello."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_shim.client.errors import KvdRefused
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, ResidentPart
from kvd.wire.protocol import (
    ATTACH_SOCKET,
    ENGINE_SOCKET,
    OPTIONAL_NAME_CHARS_MAX,
    about_problem,
)
from kvd.wire.runtime_dir import SOCKET_PATH_BYTES_MAX, RuntimeDirError, find_runtime_dir


def new_incarnation() -> int:
    """A random number of 63 bits, not 0: one life of a member process."""
    return secrets.randbits(63) or 1


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """One member process of one engine; made once in its life.

    engine:       name of the engine: one data-parallel rank of one LLM engine.
    member:       name in the engine, e.g. `scheduler`, `worker0`.
    is_scheduler: whether it decides about requests.
    rank:         tensor-parallel rank of a worker, -1 for none.
    shard:        the span of each layer that it loads and, if it contributes, saves.
    contributes:  whether its saves make up stored blocks (MLA: rank 0 only).
    hash_probe:   block hash of a fixed token list, made where the engine hashes; b"" for none.
    layout:       of the pool's blocks; None for an engine that uses no pool.
    num_slots:    slots that it registers; 0 for none, then there is no gate.
    device:       where the slots lie in its memory; None when it passes no memory.
    memory_fd:    memfd of its slots and resident parts, owned by the caller; -1 for none.
    memory_bytes: size of that memory.
    resident:     parts that stay on the device for all blocks of a layer.
    kv_port:      base of the ports where kvd listens for producers; 0 for none.
    store:        name of the store that it asks for; '' for the default of its node.
    about:        what kvd is to show of it to people: few short texts (`about_problem`), e.g.
                  offload, why, model, connector.
    incarnation:  random, the same for every attach of this process.
    """

    engine: str
    member: str
    is_scheduler: bool = False
    rank: int = -1
    tp_size: int = 1
    dp_rank: int = 0
    shard: int = 0
    contributes: bool = False
    hash_probe: bytes = b""
    layout: BlockLayoutSpec | None = None
    num_slots: int = 0
    device: DeviceLayout | None = None
    memory_fd: int = -1
    memory_bytes: int = 0
    resident: tuple[ResidentPart, ...] = ()
    kv_port: int = 0
    store: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    incarnation: int = field(default_factory=new_incarnation)

    def __post_init__(self) -> None:
        if self.num_slots < 0:
            raise ValueError(f"num_slots must be at least 0, got {self.num_slots}")
        if (self.memory_fd >= 0) != (self.memory_bytes > 0):
            raise ValueError("memory_fd and memory_bytes must be given together")
        if self.device is not None and len(self.device.slot_offsets) != self.num_slots:
            given = len(self.device.slot_offsets)
            raise ValueError(f"device describes {given} slots, num_slots is {self.num_slots}")
        if self.device is not None and self.memory_fd < 0:
            raise ValueError("device needs the memory that it describes: memory_fd is missing")
        if self.layout is not None and not 0 <= self.shard < self.layout.num_shards:
            shards = self.layout.num_shards
            raise ValueError(f"shard must be 0 to {shards - 1}, got {self.shard}")
        if len(self.store) > OPTIONAL_NAME_CHARS_MAX:
            given = len(self.store)
            raise ValueError(f"store has {given} characters, over {OPTIONAL_NAME_CHARS_MAX}")
        problem = about_problem(self.about)
        if problem:
            raise ValueError(problem)

    def __str__(self) -> str:
        return f"{self.engine}/{self.member}"


@dataclass(frozen=True, slots=True)
class Sockets:
    """Where a kvd is reached."""

    directory: Path

    @classmethod
    def find(cls, configured: str = "", env: Mapping[str, str] | None = None) -> Sockets:
        """Apply the rule that the daemon applies.

        Args:
            configured: the directory, empty to take it from the environment.
            env: the environment, None for that of this process.

        Raises: KvdRefused(runtime_dir_unusable): no rule applies, or a path is too long.
        """
        try:
            path = find_runtime_dir(configured, os.environ if env is None else env, os.geteuid())
        except RuntimeDirError as error:
            raise KvdRefused(
                "runtime_dir_unusable", path=error.path, detail=error.detail
            ) from error
        length = len(os.fsencode(path / ENGINE_SOCKET))
        if length > SOCKET_PATH_BYTES_MAX:
            detail = f"{ENGINE_SOCKET} in it has a path of {length} bytes"
            limit = f"over the {SOCKET_PATH_BYTES_MAX} that the system allows"
            raise KvdRefused("runtime_dir_unusable", path=path, detail=f"{detail}, {limit}")
        return cls(path)

    @property
    def attach(self) -> Path:
        """Where processes attach (SEQPACKET)."""
        return self.directory / ATTACH_SOCKET

    @property
    def engine(self) -> Path:
        """Where requests go (ZeroMQ)."""
        return self.directory / ENGINE_SOCKET
