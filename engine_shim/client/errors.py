"""Refusals as an engine sees them: a code, the values it names, one sentence, one remedy.

kvd's replies carry code and context of its catalogue and no text. Codes that the client itself can
give have their sentences here; any other code is shown with the values that came with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_TEXTS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "unreachable": (
            "cannot reach kvd at {path}: {detail}",
            "Is the daemon running? Try `systemctl status kvd`, or set KVD_RUNTIME_DIR.",
        ),
        "runtime_dir_unusable": (
            "runtime directory {path} cannot be used: {detail}",
            "Give the daemon's directory with KVD_RUNTIME_DIR.",
        ),
        "server_untrusted": (
            "{path} is served by uid {uid}",
            "Run kvd as this user or as root, or name that uid in trusted_uids.",
        ),
        "protocol_mismatch": (
            "kvd speaks protocol {theirs}, this engine speaks {ours}",
            "Install matching versions of kvd on both sides.",
        ),
        "deadline_exceeded": (
            "{what} did not end before its deadline",
            "See `kvctl story` for what it waited for.",
        ),
        "busy": ("the limit of {limit} {what} is reached", "Try again after a pause."),
        "pool_lost": (
            "{what} belongs to an earlier life of kvd",
            "Look up and reserve again; what was loaded and saved is void.",
        ),
        "slot_unknown": (
            "slot {slot} is outside the {count} slots of member {member}",
            "Register as many slots as the ring uses.",
        ),
        "slot_quarantined": (
            "slot {slot} is quarantined: somebody may still touch it",
            "Rebind its layers to a spare slot; see `kvctl slots` for who holds it.",
        ),
        "tenancy_misused": (
            "slot {slot} at epoch {epoch}: {detail}",
            "Report each step of a tenancy once and in its order.",
        ),
        "load_open": (
            "slot {slot} still has loads running",
            "Report load_ended before computed.",
        ),
        "frame_malformed": ("a message cannot be read: {detail}", "Correct the named field."),
        "frame_too_large": (
            "a frame of {size} bytes is over the limit of {limit}",
            "Split the batch.",
        ),
        "store_unknown": (
            "the engine asks for store {store!r}, its node has {names}",
            "Add it to store.names in kvd.toml, or take `backend` out of the engine's connector.",
        ),
        "process_forked": (
            "this client belongs to process {maker}, not to {user}",
            "Make a client of its own in every process.",
        ),
        "closed": ("this client is closed", "Make a new client."),
    }
)


class KvdRefused(Exception):
    """Something was not done, and nothing was changed."""

    def __init__(self, code: str, /, **context: object) -> None:
        """Make the refusal.

        Args:
            code: stable identifier, of this module or of kvd's catalogue.
            context: the values that the sentence names.
        """
        self.code = code
        self.context: dict[str, str] = {key: str(value) for key, value in context.items()}
        super().__init__(code, self.context)

    @property
    def what(self) -> str:
        """What is wrong, one sentence."""
        text = _TEXTS.get(self.code)
        if text is not None:
            return text[0].format_map(_Given(self.context)) + "."
        values = ", ".join(f"{key}={value}" for key, value in self.context.items())
        return f"kvd refused ({values})." if values else "kvd refused."

    @property
    def remedy(self) -> str:
        """What to do about it, one sentence; empty for a code that only kvd's catalogue has."""
        text = _TEXTS.get(self.code)
        return text[1] if text is not None else ""

    def __str__(self) -> str:
        """Code, sentence and remedy in one line."""
        return f"{self.code}: {self.what} {self.remedy}".rstrip()


class SlotQuarantined(KvdRefused):
    """The slot will not become free in foreseeable time: rebind its layers to a spare one."""

    def __init__(self, slot: int) -> None:
        super().__init__("slot_quarantined", slot=slot)
        self.slot = slot


class _Given(dict[str, str]):
    """Context for `str.format_map`: what was not given shows as `?`, never as a crash."""

    def __missing__(self, key: str) -> str:
        return "?"
