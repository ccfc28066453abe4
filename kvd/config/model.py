"""What can be configured: one frozen model per section of `kvd.toml`, defaults included.

The descriptions are the documentation: `etc/kvd.toml`, `docs/limits.md` and `kvctl config` are
made from them. Values are plain integers in bytes and nanoseconds; texts with units are read in
`load`, so that code builds models with numbers: `PoolConfig(size=64 << 20)`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

from kvd.config.fields import (
    Bytes,
    Nanoseconds,
    choice_field,
    count_field,
    duration_field,
    flag_field,
    fraction_field,
    size_field,
    text_field,
)
from kvd.config.limits import LimitsConfig

_UID_MAX: Final = 2**32 - 2  # 2^32 - 1 means "no uid" to the kernel

HugePages = Literal["require", "prefer", "off"]
Owner = Literal["auto", "fdstore", "holder", "none"]

_NODE_RULE: Final = (r"^(any|interleave|[0-9]{1,4})$", "any, interleave or the number of a node")

_STORES_MAX: Final = 16
_STORE_PATTERN: Final = r"^[0-9A-Za-z_.:@-]{1,64}$"
_STORE_RULE: Final = "1 to 64 letters, digits and _ . : @ -"


class ServerConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """The daemon itself: where it listens, who may attach, how it logs and stops."""

    runtime_dir: str = text_field(
        "",
        r"^(/[^\x00]*)?$",
        "an absolute path, or empty",
        "Directory of the sockets and the lock. Empty: $RUNTIME_DIRECTORY (set by systemd), else "
        "/run/kvd for root, else $XDG_RUNTIME_DIR/kvd. KVD_RUNTIME_DIR sets it too. Keep it short: "
        "the path of a socket in it may have 107 bytes.",
    )
    allowed_uids: tuple[Annotated[int, Field(ge=0, le=_UID_MAX)], ...] = Field(
        default=(),
        strict=False,  # TOML gives a list
        description="Users that may attach, besides root and the user of the daemon. Engines that "
        "share a region trust each other; give tenants regions of their own.",
        json_schema_extra={
            "kind": "uids",
            "rule": f"a list of user ids between 0 and {_UID_MAX}",
            # The filter of engine.sock is fixed once it listens.
            "reloadable": False,
        },
    )
    log_level: Literal["debug", "info", "warning", "error"] = choice_field(
        "info",
        "debug info warning error",
        "Least severe log event that is written.",
        reloadable=True,
    )
    log_format: Literal["auto", "json", "console"] = choice_field(
        "auto",
        "auto json console",
        "Form of log events: one JSON document a line, or text for people. auto: console on a "
        "terminal, json elsewhere.",
    )
    frame_size_max: Bytes = size_field(
        "4MiB",
        "64KiB",
        "64MiB",
        "Largest control message. A larger one is refused with frame_too_large before it is read. "
        "It must hold the hashes of limits.blocks_per_request blocks.",
    )
    grace_period: Nanoseconds = duration_field(
        "5s",
        "0s",
        "10min",
        "Time that running transfers get to end when the daemon is asked to stop.",
        reloadable=True,
    )
    oom_score_adj: Annotated[int, Field(ge=-1000, le=1000)] | Literal["auto"] | None = Field(
        default="auto",
        description="How readily the kernel ends kvd when memory runs out (oom_score_adj of proc). "
        "It counts the whole pool as kvd's, so that kvd would always go first, and little is won: "
        "the pool is to survive its daemon. auto: -900 where kvd may set it, unless the service "
        "manager has lowered it already. A number is refused at start when the kernel does not "
        'take it. "none" leaves it as it is.',
        json_schema_extra={
            "kind": "optional_count",
            "rule": 'between -1000 and 1000, "auto" or "none"',
            "reloadable": False,
        },
    )


class PoolConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """The host memory that holds blocks of prefill engines."""

    size: Bytes = size_field(
        "1GiB",
        "64KiB",
        "64TiB",
        "Host memory for blocks. It is populated at start; the daemon refuses to start when it "
        "does not fit. Rounded up to whole pages.",
    )
    huge_pages: HugePages = choice_field(
        "prefer",
        "require prefer off",
        "require: start only with huge pages of the kernel's pool (vm.nr_hugepages). prefer: use "
        "them when enough are free, else ordinary pages, and say so in the status. off: ordinary "
        "pages. Huge pages make populating three times and scattered reads 1.5 times faster.",
    )
    owner: Owner = choice_field(
        "auto",
        "auto fdstore holder none",
        "Who keeps the memory while kvd is down, so that its next life finds every block again. "
        "fdstore: systemd (FileDescriptorStoreMax= in the unit); over a stop and start only from "
        "systemd 254 on. holder: a tiny process, `kvd --hold`; a unit of its own under systemd. "
        "auto: the store where it survives a stop, else the holder, which kvd starts itself where "
        "no service manager does; that one ends when kvd is stopped as asked. none: nobody, the "
        "pool ends with kvd.",
    )
    hold_ttl: Nanoseconds = duration_field(
        "10min",
        "1s",
        "24h",
        "How long a holder that kvd starts keeps the memory when kvd does not come back.",
    )
    numa_node: str = text_field(
        "any",
        *_NODE_RULE,
        "NUMA node of the pool's memory. any: as the kernel likes. A number: that node alone, huge "
        "pages included; what it cannot give is refused. interleave: spread evenly over all nodes "
        "that kvd may use. Choose the node of the accelerators that the pool serves.",
    )
    lock: bool = flag_field(
        False,
        "Keep the pool and decode regions from the swap space (mlock), while kvd runs. Needs "
        "LimitMEMLOCK=infinity, or CAP_IPC_LOCK. Huge pages of the kernel's pool are never "
        "swapped.",
    )
    populate_step: Bytes = size_field(
        "64MiB",
        "2MiB",
        "64GiB",
        "Memory populated between two reports of progress at start.",
    )
    headroom: Bytes = size_field(
        "512MiB",
        "0B",
        "4TiB",
        "Host memory that must stay available to everyone else after the pool or a decode region "
        "is populated; what does not leave that much is refused.",
    )
    checksums: Literal["off", "sampled", "always"] = choice_field(
        "always",
        "off sampled always",
        "Checksums of what lies in the pool, computed while it is copied in and compared while it "
        "is copied out; a mismatch is a miss or an error, never wrong bytes. always: every span "
        "of every block; a copy takes 2 to 20 % longer. sampled: every eighth. off: wrong bytes "
        "in host memory are not noticed.",
    )
    eviction: Literal["lru", "arc"] = choice_field(
        "arc",
        "lru arc",
        "Which unpinned block makes room. lru: the one whose last use is oldest. arc: the same, "
        "but blocks that were found again are kept apart from those that never were, so that long "
        "documents read once do not displace what is shared.",
    )
    high_water: float = fraction_field(
        0.99,
        0.5,
        1.0,
        "Share of the blocks in use above which blocks are evicted ahead of need, a batch at a "
        "time, so that a reservation seldom has to. 1.0: only a reservation evicts.",
    )
    low_water: float = fraction_field(
        0.98,
        0.25,
        1.0,
        "Share of the blocks in use where that ends; at most pool.high_water.",
    )
    block_count_max: int = count_field(
        1_048_576,
        1,
        16_777_216,
        "Blocks of the pool.",
        at_limit="A pool of more blocks uses only so many; the rest of its memory stays unused and "
        "the status says so.",
    )


class RegionsConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """The host memory that holds the full KV of decode engines."""

    size_max: Bytes = size_field(
        "0B",
        "0B",
        "64TiB",
        "Memory that all decode regions together may have; one more is refused with limit_reached. "
        "0B: no cap of its own, only what the host has free (see pool.headroom).",
        reloadable=True,
    )
    huge_pages: HugePages = choice_field(
        "prefer",
        "require prefer off",
        "Pages of decode regions; meaning as for pool.huge_pages.",
    )
    numa_node: str = text_field(
        "any",
        *_NODE_RULE,
        "NUMA node of decode regions; meaning as for pool.numa_node.",
    )


class StoreConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Names under which engines may ask for a store; all are this node's embedded pool today."""

    names: tuple[Annotated[str, Field(pattern=_STORE_PATTERN)], ...] = Field(
        default=("local",),
        min_length=1,
        max_length=_STORES_MAX,
        strict=False,  # TOML gives a list
        description="Names under which engines may ask for a store of this node (`backend` of "
        "their connector); all of them are the embedded pool today. The hello that names another "
        "one is refused with store_unknown; engines that are attached already stay.",
        json_schema_extra={
            "kind": "names",
            "rule": f"a list of 1 to {_STORES_MAX} names, each {_STORE_RULE}",
            "reloadable": True,
        },
    )
    default: str = text_field(
        "local",
        _STORE_PATTERN,
        _STORE_RULE,
        "The store of engines that name none; one of store.names.",
        reloadable=True,
    )


class ReleaseConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Deadlines of the release rule. None of them frees memory: a missed one asks for the truth."""

    compute_deadline: Nanoseconds = duration_field(
        "60s",
        "100ms",
        "24h",
        "Longest time a slot is computed with before its engine is asked about it.",
        reloadable=True,
    )
    save_deadline: Nanoseconds = duration_field(
        "20s",
        "100ms",
        "1h",
        "Longest time a save runs before its hold is suspect.",
        reloadable=True,
    )
    offer_deadline: Nanoseconds = duration_field(
        "10s",
        "100ms",
        "1h",
        "Longest time an offered read stays unclaimed before the offer is revoked.",
        reloadable=True,
    )
    read_deadline: Nanoseconds = duration_field(
        "5s",
        "100ms",
        "1h",
        "Longest time a granted read runs before its hold is suspect.",
        reloadable=True,
    )
    query_interval: Nanoseconds = duration_field(
        "500ms",
        "10ms",
        "1min",
        "Pause between two questions about a suspect hold.",
        reloadable=True,
    )
    query_attempts: int = count_field(
        6,
        1,
        1000,
        "Questions about a suspect hold before a fence is asked for.",
        reloadable=True,
    )
    read_attempts: int = count_field(
        2,
        1,
        100,
        "Times that a read which failed and ended is tried before its transfer fails.",
        reloadable=True,
    )


class LeasesConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """How long a promise lasts when nobody renews it."""

    lookup_lease: Nanoseconds = duration_field(
        "30s",
        "100ms",
        "1h",
        "Time that blocks found by a lookup stay pinned until the request reserves or renews.",
        reloadable=True,
    )


class PeersConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Other kvd daemons, for the hand-off from prefill to decode."""

    listen_host: str = text_field(
        "127.0.0.1",
        r"^([0-9A-Za-z._-]{1,253}|[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Za-z:.%]{0,64})$",
        "an address or host name, without a port",
        "Address on which the daemon accepts peers, on the ports of its registered ranks. Peers "
        "are not authenticated beyond their handshake: never use a public address.",
    )
    connect_timeout: Nanoseconds = duration_field(
        "5s",
        "50ms",
        "5min",
        "Longest time that reaching a peer and agreeing with it takes.",
        reloadable=True,
    )
    transfer_deadline: Nanoseconds = duration_field(
        "120s",
        "1s",
        "24h",
        "Longest life of a transfer whose request carries no deadline of its own.",
        reloadable=True,
    )


class ReadinessConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """When /readyz answers that the daemon should get no new work."""

    oldest_wait_max: Nanoseconds = duration_field(
        "120s",
        "1s",
        "24h",
        "Longest wait for a slot or a block that still counts as healthy.",
        reloadable=True,
    )


class MetricsConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """What /metrics shows."""

    enabled: bool = flag_field(True, "Whether /metrics is served on the admin socket.")


class Config(BaseModel, frozen=True, extra="forbid", strict=True):
    """The whole configuration; `Config()` is the defaults."""

    server: ServerConfig = ServerConfig()
    pool: PoolConfig = PoolConfig()
    regions: RegionsConfig = RegionsConfig()
    store: StoreConfig = StoreConfig()
    release: ReleaseConfig = ReleaseConfig()
    leases: LeasesConfig = LeasesConfig()
    limits: LimitsConfig = LimitsConfig()
    peers: PeersConfig = PeersConfig()
    readiness: ReadinessConfig = ReadinessConfig()
    metrics: MetricsConfig = MetricsConfig()
