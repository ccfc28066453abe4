"""Hot buffers of decode, as `kvctl` shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from kvd.cli.layout import table
from kvd.cli.text import percent
from kvd.server.models import HotLayerView, HotRequestView
from kvd.server.models_tables import MemberView

NUMBERS = ("hits", "misses", "hit rate", "merged", "overlap", "us a step")


def request_table(requests: Sequence[tuple[str, HotRequestView]]) -> Table:
    """Requests of some engines, those with the most misses first. Args: requests: and whose."""
    made = table("decode", "request", "steps", *NUMBERS, right=("steps", *NUMBERS))
    for engine, one in requests:
        made.add_row(engine, one.request, str(one.steps), *_numbers(one))
    return made


def hot_tables(members: Iterable[MemberView]) -> Iterable[Table]:
    """Of each member that decodes: its indexer layers, then its requests by layer."""
    for member in members:
        if member.hot_layers:
            layers = table(f"{member.member}: layer", *NUMBERS, right=NUMBERS)
            for layer in member.hot_layers:
                layers.add_row(str(layer.layer), *_numbers(layer))
            yield layers
        if member.hot_requests:
            requests = table("request", "layer", "steps", *NUMBERS, right=("steps", *NUMBERS))
            for one in member.hot_requests:
                requests.add_row(one.request, "all", str(one.steps), *_numbers(one))
                for layer in one.layers:
                    requests.add_row("", str(layer.layer), "", *_numbers(layer))
            yield requests


def _numbers(one: HotLayerView | HotRequestView) -> tuple[str, ...]:
    looked_up = one.hits + one.misses
    return (
        str(one.hits),
        str(one.misses),
        percent(one.hits, looked_up),
        str(one.merged),
        "-" if one.overlap is None else f"{100 * one.overlap:.1f}%",
        f"{one.managed_seconds * 1e6:.1f}" if one.managed_seconds else "-",
    )
