"""`kvd`: the daemon's command line and composition root.

argparse instead of the friendlier library of `kvctl`: the daemon answers /livez a few hundred
milliseconds after its start, and every import counts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvd import __version__
from kvd.core.errors import ConfigError, KvdError

if TYPE_CHECKING:
    from kvd.config.load import LoadedConfig

EXIT_OK: Final = 0
EXIT_REFUSED: Final = 1
EXIT_FORCED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INVARIANT: Final = 70

_DESCRIPTION: Final = """\
Own this node's host memory for KV caches, and decide when a layer buffer may be written again.
Engines attach through a runtime directory; `kvctl status` shows everything.
"""

_EPILOG: Final = """\
examples:
  kvd                                        start with /etc/kvd/kvd.toml, or defaults
  kvd --set pool.size=64GiB                  the same with a pool of 64 GiB
  kvd --check-config --config ./kvd.toml     say everything that is wrong with a file, and end
  kvd --runtime-dir /run/kvd-2               a second daemon beside the first
  kill -HUP PID                              load the file again; `kvctl config` marks what applies
  kvd --hold                                 keep the memory of the kvd in /run/kvd (see pool.owner)

exit codes: 0 stopped as asked, 1 refused to start, or asked twice to stop, 2 wrong usage,
            70 kvd contradicted itself
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "kvd",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--config", type=Path, metavar="FILE", help="configuration file (TOML)")
    made.add_argument(
        "--runtime-dir",
        metavar="DIR",
        help="directory of the sockets and the lock (default: $KVD_RUNTIME_DIR, "
        "$RUNTIME_DIRECTORY, /run/kvd for root, else $XDG_RUNTIME_DIR/kvd)",
    )
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key, e.g. pool.size=64GiB; may be repeated",
    )
    made.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    made.add_argument("--log-format", metavar="FORMAT", help="json, console or auto")
    made.add_argument("--check-config", action="store_true", help="check the configuration and end")
    made.add_argument(
        "--hold",
        action="store_true",
        help="be the holder: keep the memory of this runtime directory's kvd while that is down",
    )
    made.add_argument(
        "--hold-ttl",
        metavar="TIME",
        help="with --hold: give the memory up when no kvd comes for so long (default: "
        "pool.hold_ttl)",
    )
    # How a daemon starts its own holder.
    made.add_argument("--hold-once", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--hold-ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    made.add_argument("--version", action="version", version=f"kvd {__version__}")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Run the daemon and exit."""
    # Interrupted before it has anything to give back, it ends by the signal, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Whoever changed the configuration meanwhile waits until it can be loaded again.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the daemon; returns its exit code."""
    args = parser().parse_args(argv)
    if not __debug__:
        print("kvd: refuses to run under python -O: its checks would be off", file=sys.stderr)
        return EXIT_USAGE
    try:
        flags = _flags(args)
    except ValueError as error:
        print(f"kvd: {error}", file=sys.stderr)
        return EXIT_USAGE
    from kvd.config.load import load_config

    def read() -> LoadedConfig:
        return load_config(args.config, os.environ, flags)

    try:
        loaded = read()
    except ConfigError as error:
        _print_problems(error)
        return EXIT_REFUSED
    if args.check_config:
        print(
            f"kvd: the configuration is good ({_source(args.config)}); "
            "whether the memory is there is seen at the start"
        )
        return EXIT_OK
    try:
        if args.hold:
            from kvd.cli.hold import hold_memory

            hold_memory(loaded.config, once=args.hold_once, ready_fd=args.hold_ready_fd)
            return EXIT_OK
        from kvd.cli.serve import serve

        return serve(loaded, read)
    except KvdError as error:
        print(f"kvd: {error}", file=sys.stderr)
        return EXIT_REFUSED


def _flags(args: argparse.Namespace) -> dict[str, str]:
    """Command line settings as configuration keys.

    Raises: ValueError for a --set that is not KEY=VALUE, or a --hold-ttl without --hold.
    """
    if args.hold_ttl is not None and not args.hold:
        raise ValueError(
            "--hold-ttl belongs to --hold; for the holder that kvd starts itself, use "
            "--set pool.hold_ttl=TIME"
        )
    flags: dict[str, str] = {}
    for text in args.set:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ValueError(f"--set {text!r} is not KEY=VALUE, e.g. --set pool.size=64GiB")
        flags[key.strip()] = value.strip()
    for name, key in (
        ("runtime_dir", "server.runtime_dir"),
        ("log_level", "server.log_level"),
        ("log_format", "server.log_format"),
        ("hold_ttl", "pool.hold_ttl"),
    ):
        value = getattr(args, name)
        if value is not None:
            flags[key] = os.path.abspath(value) if name == "runtime_dir" and value else value
    return flags


def _print_problems(error: ConfigError) -> None:
    count = len(error.problems)
    print(f"kvd: the configuration has {count} problem(s):", file=sys.stderr)
    for problem in error.problems:
        print(f"  {problem}", file=sys.stderr)
    print("Nothing was started.", file=sys.stderr)


def _source(config: Path | None) -> str:
    return str(config) if config is not None else "defaults, environment and flags"
