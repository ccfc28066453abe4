"""`kvctl`: ask a running kvd what is going on.

Only what every call needs is imported here; tables, models and the connection are loaded by the
command that uses them, so that help, completion and mistakes answer at once.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from kvd import __version__
from kvd.cli.commands import Commands
from kvd.cli.options import (
    AfterOption,
    BlockEngineOption,
    BlockStateChoice,
    BlockStateOption,
    EngineOption,
    LimitOption,
    MemberOption,
    Output,
    OutputOption,
    Place,
    RuntimeDirOption,
    SlotStateOption,
    SocketOption,
    StoryLimitOption,
    WatchOption,
)
from kvd.core.errors import KvdError, LocalError
from kvd.wire.protocol import ADMIN_SOCKET, HOLD_SOCKET

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvd.cli.client import AdminClient
    from kvd.server.models import Model, Status
    from kvd.server.models_tables import BlockPage, ConfigPage, EnginePage, SlotPage, StoryPage

M = TypeVar("M", bound="Model")

EXIT_OK: Final = 0
EXIT_REFUSED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
EXIT_DEGRADED: Final = 4

_PIPE_COLUMNS: Final = 200

WATCH_BACKLOG: Final = 10
"""How many samples of a watch are made up for at most."""
"""Width where nobody sees an edge: names stay on one line."""

app = typer.Typer(
    name="kvctl",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvctl {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    socket: SocketOption = None,
    runtime_dir: RuntimeDirOption = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Ask a running kvd what is going on. Nothing here changes anything.

    \b
    kvctl status                   is it well? memory, pool, slots, the oldest wait
    kvctl status -o json -w 0.5    the same for a program, twice a second
    kvctl slots --state suspect    who is late, and what was asked
    kvctl story req-17             everything recorded about a request, slot, block or transfer
    kvctl errors pool_full         what an error code means, and what to do

    \b
    Exit codes: 0 well, 1 refused, 2 wrong usage, 3 kvd cannot be reached,
    4 kvd answers but is degraded (status only).
    """
    context.obj = Place(socket, runtime_dir)


@app.command(short_help="the node at one look; exits with 4 when it is degraded")
def status(
    context: typer.Context,
    output: OutputOption = Output.TABLE,
    watch: WatchOption = None,
    socket: SocketOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """The node at one look: phase, memory, pool, slots, holds, the oldest wait, engines, peers.

    \b
    Shows first why kvd is not ready, or what an operator should look at, with what to do about it.
    Exits with 4 in the second case, so that scripts need not parse anything.
    """

    def ask(client: AdminClient) -> Status:
        return client.status()

    shown = _tell(_place(context, socket, runtime_dir), output, watch, ask)
    if shown.degraded:
        raise typer.Exit(EXIT_DEGRADED)


@app.command(short_help="layer buffers, and who may still touch each")
def slots(
    context: typer.Context,
    engine: EngineOption = "",
    member: MemberOption = "",
    state: SlotStateOption = None,
    limit: LimitOption = 200,
    after: AfterOption = "",
    output: OutputOption = Output.TABLE,
    watch: WatchOption = None,
    socket: SocketOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Layer buffers of the workers, and who may still touch each of them.

    \b
    A slot is free when it has no holds. `suspect` is a party that is late: it is being asked, then
    fenced. `quarantined` is one that can be neither; its slot stays out of use.
    """
    wanted = state.value if state is not None else ""

    def ask(client: AdminClient) -> SlotPage:
        return client.slots(limit, after=after, engine=engine, member=member, state=wanted)

    _tell(_place(context, socket, runtime_dir), output, watch, ask)


@app.command(short_help="blocks of the pool, and who keeps them")
def blocks(
    context: typer.Context,
    engine: BlockEngineOption = "",
    state: BlockStateOption = BlockStateChoice.USED,
    limit: LimitOption = 200,
    after: AfterOption = "",
    output: OutputOption = Output.TABLE,
    watch: WatchOption = None,
    socket: SocketOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Blocks of the pool: their state, how far they are filled, and who keeps them.

    \b
    `filling` is private to the request that reserved it, `ready` is found by look-ups, `poisoned`
    holds data that is not valid and goes once nobody keeps it.
    """

    def ask(client: AdminClient) -> BlockPage:
        return client.blocks(limit, after=after, engine=engine, state=state.value)

    _tell(_place(context, socket, runtime_dir), output, watch, ask)


@app.command(short_help="engines and their members")
def engines(
    context: typer.Context,
    output: OutputOption = Output.TABLE,
    watch: WatchOption = None,
    socket: SocketOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Engines and their members: what they say of themselves, ranks, processes, slots, figures."""

    def ask(client: AdminClient) -> EnginePage:
        return client.engines()

    _tell(_place(context, socket, runtime_dir), output, watch, ask)


@app.command(short_help="everything recorded about one thing")
def story(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="ID", help="What to tell about.")],
    limit: StoryLimitOption = 200,
    output: OutputOption = Output.TABLE,
    watch: WatchOption = None,
    socket: SocketOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Everything recorded about one slot, step, request, block, transfer or member, oldest first.

    \b
    kvctl story 'engine0/worker0#1f/slot3@7'   one tenancy of a slot
    kvctl story slot3                          slot 3 of every member, all tenancies
    kvctl story req-17                         a request
    kvctl story block12                        a block of the pool
    kvctl story 'step 3 of engine0/worker0#1f' a step that keeps blocks
    """

    if not name.strip():
        raise typer.BadParameter("it is empty", param_hint="ID")

    def ask(client: AdminClient) -> StoryPage:
        return client.story(name, limit)

    _tell(_place(context, socket, runtime_dir), output, watch, ask)


@app.command(short_help="every key, its value and where that came from")
def config(
    context: typer.Context,
    output: OutputOption = Output.TABLE,
    socket: SocketOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Every key of the configuration that kvd runs with, its value and where that came from.

    \b
    Reloadable keys take effect when kvd gets SIGHUP, the others at its next start.
    """

    def ask(client: AdminClient) -> ConfigPage:
        return client.config()

    _tell(_place(context, socket, runtime_dir), output, None, ask)


@app.command(short_help="what error codes mean, and what to do")
def errors(
    code: Annotated[str, typer.Argument(metavar="[CODE]", help="Explain only this one.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """What the error codes mean, and what to do about each. Needs no running kvd."""
    import difflib

    from kvd.server.problems import ALL_ERRORS

    if code and code not in ALL_ERRORS:
        near = difflib.get_close_matches(code, ALL_ERRORS, n=1)
        hint = f"did you mean {near[0]}?" if near else "`kvctl errors` lists them all"
        typer.echo(f"kvctl: there is no error code {code!r}; {hint}", err=True)
        raise typer.Exit(EXIT_REFUSED)
    rows = [ALL_ERRORS[code]] if code else list(ALL_ERRORS.values())
    if output is Output.JSON:
        import json

        from kvd.cli.text import named

        told = [
            {
                "code": row.code,
                "status": row.status,
                "retry": row.retry.value,
                "what": named(row.what),
                "remedy": named(row.remedy),
            }
            for row in rows
        ]
        typer.echo(json.dumps(told, indent=2))
        return
    from kvd.cli.render import render_errors

    _print_table(render_errors(rows))


# Underneath --------------------------------------------------------------------------------------


def _place(context: typer.Context, socket: Path | None, runtime_dir: Path | None) -> Place:
    """Which kvd is meant; what stands behind the command goes before what stands in front."""
    front: Place = context.obj
    if socket is not None or runtime_dir is not None:
        return Place(socket, runtime_dir)
    return front


def _tell(
    place: Place,
    output: Output,
    watch: float | None,
    ask: Callable[[AdminClient], M],
) -> M:
    """Ask and show, again and again when watching; returns what was shown last.

    Refusals become a message and an exit code; an interrupt ends a watch well.
    """
    from kvd.cli.client import AdminClient

    try:
        with AdminClient(_socket_path(place), warn=_warn) as client:
            document = ask(client)
            _show(document, output, watch)
            try:
                due = time.monotonic()
                while watch is not None:
                    due = next_due(due, watch, time.monotonic())
                    time.sleep(max(0.0, due - time.monotonic()))
                    document = ask(client)
                    _show(document, output, watch)
            except KeyboardInterrupt:
                raise typer.Exit(EXIT_OK) from None
            return document
    except KvdError as error:
        typer.echo(f"kvctl: {error}", err=True)
        is_away = error.code == "unreachable"
        if is_away and Path(error.context.get("path", "")).with_name(HOLD_SOCKET).exists():
            _warn("a holder keeps its memory meanwhile: the next kvd there finds every block again")
        raise typer.Exit(EXIT_UNREACHABLE if is_away else EXIT_REFUSED) from error


def next_due(due: float, interval: float, now: float) -> float:
    """When the next sample is due: what came late is made up for, what a long pause cost is not."""
    return max(due + interval, now - WATCH_BACKLOG * interval)


def _socket_path(place: Place) -> Path:
    from kvd.wire.runtime_dir import RuntimeDirError, find_runtime_dir

    if place.socket is not None:
        return place.socket
    configured = os.path.abspath(place.runtime_dir) if place.runtime_dir is not None else ""
    try:
        return find_runtime_dir(configured, os.environ, os.geteuid()) / ADMIN_SOCKET
    except RuntimeDirError as error:
        raise LocalError("unreachable", path=error.path, detail=error.detail) from error


def _warn(text: str) -> None:
    typer.echo(f"kvctl: {text}", err=True)


def _show(document: Model, output: Output, watch: float | None) -> None:
    if output is Output.JSON:
        from kvd.cli.text import safe_json

        typer.echo(safe_json(document.model_dump_json(indent=None if watch else 2)))
        sys.stdout.flush()
    else:
        from kvd.cli.render import render

        _print_table(render(document), again=watch is not None)


def _print_table(content: RenderableType, again: bool = False) -> None:
    from kvd.cli.layout import to_text

    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else _PIPE_COLUMNS
    color = is_terminal and "NO_COLOR" not in os.environ
    if again and is_terminal:
        typer.echo("\x1b[H\x1b[2J", nl=False)
    typer.echo(to_text(content, width, color), nl=False)
    if again and not is_terminal:
        typer.echo()
    sys.stdout.flush()


def main() -> None:
    """Run `kvctl`."""
    try:
        app()
    except OSError as error:
        # Who asks kvd turns errors of the connection into refusals: this is our own output. A pipe
        # that nobody reads any more has ended it before.
        _give_output_up()
        typer.echo(f"kvctl: cannot write: {error.strerror or error}", err=True)
        sys.exit(EXIT_REFUSED)


def _give_output_up() -> None:
    """What is left in the buffer would fail once more at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    main()
