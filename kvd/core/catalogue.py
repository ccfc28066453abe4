"""The error catalogue: every refusal kvd can give, in one table.

Replies on the wire carry code and context; text is rendered at the edge, from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final


class Retry(Enum):
    """What the one who was refused may do next."""

    NEVER = "never"
    SAME = "same"
    AFTER_REATTACH = "after_reattach"


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """One row of the catalogue.

    code:    stable identifier, snake_case.
    status:  HTTP status the admin API answers with.
    retry:   who should try again, and how.
    what:    one sentence, formatted with the error's context.
    remedy:  one sentence for the operator.
    """

    code: str
    status: int
    retry: Retry
    what: str
    remedy: str


_N, _S, _A = Retry.NEVER, Retry.SAME, Retry.AFTER_REATTACH

_ROWS: Final = (
    # configuration and start
    ErrorSpec("config_invalid", 400, _N, "{detail}", "Correct the configuration and start again."),
    ErrorSpec(
        "memory_short",
        507,
        _N,
        "{region} needs {need} but only {free} is available ({limit})",
        "{fix}",
    ),
    ErrorSpec(
        "hugepages_short",
        507,
        _N,
        "{region} needs {need} huge pages of {page_size} but {free} are free",
        "{fix}",
    ),
    ErrorSpec("numa_unusable", 507, _N, "{region} is to be {where}, but {why}", "{fix}"),
    ErrorSpec(
        "oom_score_refused",
        403,
        _N,
        "server.oom_score_adj is {asked}, but the kernel did not take it from this process "
        "({detail}), which has {now}",
        "Let the service manager set it (OOMScoreAdjust={asked} in the unit), or choose a value "
        'that is not lower, or "auto".',
    ),
    ErrorSpec(
        "already_running",
        409,
        _N,
        "another {who} (pid {pid}) holds {path}",
        "Stop that process, or give this one its own --runtime-dir.",
    ),
    ErrorSpec(
        "runtime_dir_unusable",
        400,
        _N,
        "runtime directory {path} cannot be used: {detail}",
        "Give kvd a directory of its own with --runtime-dir; it makes one that is not there.",
    ),
    ErrorSpec(
        "owner_unavailable",
        507,
        _N,
        "{owner} cannot keep the memory: {detail}",
        "See pool.owner; with pool.owner = none the pool ends with kvd.",
    ),
    ErrorSpec(
        "starting",
        503,
        _S,
        "kvd is starting: {percent}% of its memory is populated",
        "Wait until /readyz answers 200.",
    ),
    ErrorSpec("stopping", 503, _A, "kvd is stopping", "Attach again once it has restarted."),
    # frames and sessions
    ErrorSpec(
        "frame_malformed",
        400,
        _N,
        "a frame could not be decoded: {detail}",
        "Check that both sides run compatible versions.",
    ),
    ErrorSpec(
        "frame_too_large",
        413,
        _N,
        "a frame of {size} bytes is over the limit of {limit}",
        "Split the batch.",
    ),
    ErrorSpec("op_unknown", 400, _N, "operation {op!r} is unknown", "Upgrade the older side."),
    ErrorSpec(
        "protocol_mismatch",
        426,
        _N,
        "the peer speaks protocol {theirs}, kvd speaks {ours}",
        "Install matching versions of kvd on both sides.",
    ),
    ErrorSpec(
        "unauthorized",
        401,
        _A,
        "the session token is not known",
        "Attach through attach.sock first; a restarted kvd needs a new attach.",
    ),
    ErrorSpec(
        "forbidden",
        403,
        _N,
        "uid {uid} may not attach",
        "Run the engine as the user of kvd, or add the uid to server.allowed_uids.",
    ),
    ErrorSpec(
        "stale_boot",
        409,
        _A,
        "the message belongs to an earlier life of kvd",
        "Attach again and announce the slots.",
    ),
    ErrorSpec(
        "stale_incarnation",
        409,
        _N,
        "the message belongs to an earlier life of member {member}",
        "Stop the old process.",
    ),
    ErrorSpec(
        "out_of_order",
        409,
        _S,
        "event {got} arrived where {want} was expected",
        "Resend from the expected number.",
    ),
    ErrorSpec(
        "deadline_exceeded",
        504,
        _S,
        "{what} did not end before its deadline",
        "See `kvctl story` for what it waited for.",
    ),
    ErrorSpec(
        "busy", 503, _S, "the limit of {limit} {what} is reached", "Try again after a pause."
    ),
    ErrorSpec(
        "unreachable",
        503,
        _S,
        "cannot reach kvd at {path}: {detail}",
        "Is the daemon running? Try `systemctl status kvd`, or give --runtime-dir.",
    ),
    # engines and members
    ErrorSpec(
        "engine_unknown", 404, _A, "engine {engine!r} is not registered", "Send hello first."
    ),
    ErrorSpec(
        "engine_busy",
        409,
        _S,
        "member {member} of engine {engine!r} is still attached by pid {pid}",
        "Stop the old process, or give the new engine another name.",
    ),
    ErrorSpec(
        "layout_mismatch",
        409,
        _N,
        "engine {engine!r} has layout {theirs}, {where} has {ours}: {detail}",
        "Use the same model, dtype, block size and plan, or another daemon.",
    ),
    ErrorSpec(
        "store_unknown",
        404,
        _N,
        "engine {engine!r} asks for store {store!r}, this node has {names}",
        "Add it to store.names in kvd.toml, or take `backend` out of the engine's connector.",
    ),
    ErrorSpec(
        "hash_probe_mismatch",
        409,
        _N,
        "engine {engine!r} hashes tokens differently from the engines in its namespace",
        "Use the same hash algorithm and seed (PYTHONHASHSEED) in every engine.",
    ),
    ErrorSpec(
        "not_scheduler",
        403,
        _N,
        "member {member} may not decide about requests",
        "Send it from the engine's scheduler member.",
    ),
    ErrorSpec(
        "limit_reached",
        429,
        _N,
        "{what} {value} is over the limit of {limit}",
        "Raise limits.{key} in kvd.toml, or ask for less.",
    ),
    # slots
    ErrorSpec(
        "slot_unknown",
        404,
        _N,
        "slot {slot} is outside the {count} slots of member {member}",
        "Register as many slots as the ring uses.",
    ),
    ErrorSpec(
        "layer_unmapped",
        400,
        _N,
        "layer {layer!r} has no slot in the ring",
        "Register every cache-bearing layer before the first step.",
    ),
    ErrorSpec(
        "load_open",
        409,
        _S,
        "slot {slot} still has loads running",
        "Report load_ended before computed.",
    ),
    ErrorSpec(
        "not_contributor",
        403,
        _N,
        "member {member} does not contribute to stored blocks",
        "Save from the rank that contributes (MLA: rank 0).",
    ),
    ErrorSpec(
        "slot_quarantined",
        503,
        _N,
        "slot {slot} is quarantined and no spare buffer is left",
        "Restart the engine; see `kvctl slots` for who may still touch the slot.",
    ),
    # blocks
    ErrorSpec(
        "pool_full",
        507,
        _S,
        "{want} blocks asked, {free} free and {evictable} evictable of {total}",
        "Wait for running requests to end, or enlarge pool.size.",
    ),
    ErrorSpec(
        "reserve_too_large",
        413,
        _N,
        "{want} blocks asked, the pool has {total}",
        "Shorten the request or enlarge pool.size.",
    ),
    ErrorSpec(
        "block_not_reserved",
        409,
        _N,
        "block {block} is not reserved by request {request!r} of engine {engine!r}",
        "Commit and save only blocks that this engine reserved.",
    ),
    ErrorSpec(
        "block_poisoned", 409, _N, "block {block} is poisoned: {detail}", "Recompute its tokens."
    ),
    ErrorSpec(
        "span_busy",
        409,
        _S,
        "layer {layer} of block {block} is being {doing}",
        "Try again when that has ended.",
    ),
    ErrorSpec(
        "span_unwritten",
        409,
        _S,
        "layer {layer} of block {block} holds {have} tokens, {want} are asked",
        "Load only what a save made valid.",
    ),
    ErrorSpec(
        "request_unknown",
        404,
        _N,
        "request {request!r} of engine {engine!r} is not known",
        "It ended, or its lease ran out; look up again.",
    ),
    ErrorSpec(
        "request_ended",
        410,
        _N,
        "request {request!r} ended: {detail}",
        "Submit the request again.",
    ),
    # regions and transfers
    ErrorSpec("region_unknown", 404, _N, "region {region!r} does not exist", "Create it first."),
    ErrorSpec(
        "region_exists",
        409,
        _N,
        "region {region!r} exists with another shape",
        "Destroy it first, or use its shape.",
    ),
    ErrorSpec(
        "destination_busy",
        409,
        _S,
        "block {block} of region {region!r} is still the destination of a read",
        "Use another block until the read has ended.",
    ),
    ErrorSpec(
        "transfer_unknown",
        404,
        _N,
        "transfer {transfer} is not known",
        "It ended, or was never expected here.",
    ),
    ErrorSpec(
        "transfer_failed",
        502,
        _N,
        "transfer {transfer} failed: {detail}",
        "Send the request to a prefill engine again.",
    ),
    ErrorSpec(
        "port_taken",
        409,
        _N,
        "port {port} cannot be bound: {detail}",
        "Give the engine another kv_port; each rank needs one of its own.",
    ),
    ErrorSpec(
        "peer_refused",
        502,
        _N,
        "peer {peer} refused: {detail}",
        "Check versions, layout and user of both daemons.",
    ),
    ErrorSpec(
        "peer_unreachable",
        502,
        _S,
        "peer {peer} cannot be reached: {detail}",
        "Check that the decode node's kvd runs and that kv_port is right.",
    ),
    ErrorSpec(
        "peer_not_local",
        501,
        _N,
        "peer {peer} runs on another host and no transfer engine for that is configured",
        "Run both daemons on one host, or configure a cross-node transfer engine.",
    ),
    # admin
    ErrorSpec("not_found", 404, _N, "nothing is known about {what!r}", "See `kvctl status`."),
    ErrorSpec("internal", 500, _N, "kvd met a bug: {detail}", "Please report it with the story."),
)

CATALOGUE: Final = MappingProxyType({row.code: row for row in _ROWS})
