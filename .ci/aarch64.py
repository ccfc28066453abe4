"""The tests of the kernels on aarch64, emulated: `python3 .ci/aarch64.py`.

The kernels are built by a cross compiler, and their tests run by an aarch64 interpreter under
qemu's user mode: what NEON computes is compared with the reference. Not shown by that: speed, what
a processor of that kind reorders (the emulator's host is stricter), huge pages, and kvd itself.

Debian 12 or another system with its packages, `g++-aarch64-linux-gnu` and `qemu-user`; the
interpreter and its libraries are downloaded and unpacked beside the environments, and the system is
left as it is. Options are pytest's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import environment
from environment import ROOT, SetupError

TRIPLET: Final = "aarch64-linux-gnu"
NEEDED: Final = {f"{TRIPLET}-g++": f"g++-{TRIPLET}", "qemu-aarch64": "qemu-user"}
"""Programs, and the Debian packages that have them."""
INTERPRETER: Final = (
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libpython3.11-dev"),
    *("libc6", "libstdc++6", "libgcc-s1", "zlib1g", "libexpat1", "libssl3", "libffi8"),
    *("libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1", "libcrypt1"),
)
PACKAGES: Final = (
    *("attrs", "hypothesis", "iniconfig", "numpy", "packaging", "pluggy", "pygments", "pytest"),
    *("pytest-timeout", "sortedcontainers"),
)
"""Of the locks: what the tests of kernels import."""
LOCKS: Final = ("base", "build", "dev")
PLATFORMS: Final = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
TESTS: Final = (
    *("host_block_index", "host_copy", "host_crc32c", "host_gate", "host_header_scan", "host_sums"),
    *("host_team", "host_unlink", "residency_index", "residency_tables", "residency_threads"),
    *("residency_top_k", "residency_victims", "rows_attention", "rows_copy", "rows_scores"),
    "rows_threads",
)
NOT_EMULATED: Final = "not imports_neither"
"""A program that starts its own interpreter again starts one that this processor cannot run."""
TIMEOUT_SECONDS: Final = 300
CHOSEN: Final = """
from kvd_kernels.host import copy_kernels
from kvd_kernels.residency import residency_kernels
from kvd_kernels.rows import row_kernels
for kernels in (copy_kernels(), residency_kernels(), row_kernels()):
    assert kernels[0] == "neon", kernels
"""


def main() -> int:
    """Make what is missing, build, and run the tests; their exit status."""
    try:
        _need()
        root = _root()
        path = (_build(root), _site(), ROOT)
    except SetupError as error:
        print(f"aarch64: {error}", file=sys.stderr)
        return 1
    python = ("qemu-aarch64", "-L", str(root), str(root / "usr/bin/python3.11"))
    surroundings = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHOME": str(root / "usr"),
        "PYTHONPATH": ":".join(map(str, path)),
    }
    files = [f"tests/kernels/test_{name}.py" for name in TESTS]
    options = ("-q", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_SECONDS}", "-k", NOT_EMULATED)
    for command in (("-c", CHOSEN), ("-m", "pytest", *options, *files, *sys.argv[1:])):
        done = subprocess.run((*python, *command), cwd=ROOT, env=surroundings, check=False)
        if done.returncode:
            return done.returncode
    return 0


def _need() -> None:
    """Raise SetupError for what this machine lacks, with the remedy."""
    if sys.version_info[:2] != (3, 11):
        raise SetupError("the interpreter of aarch64 is Python 3.11: make PYTHON=python3.11")
    missing = [name for program, name in NEEDED.items() if shutil.which(program) is None]
    if missing:
        lacks = " ".join(missing)
        remedy = f"sudo apt-get install -y --no-install-recommends {lacks}"
        raise SetupError(f"this machine lacks {lacks}: {remedy}")


def _root() -> Path:
    """Return the directory with the interpreter and its libraries, made if need be.

    apt gets lists and an architecture of its own: those of the system stay as they are.
    """
    made = (
        environment.where()
        / f"aarch64-python-{environment.digest_of(' '.join(INTERPRETER).encode())}"
    )
    with environment.making(made) as needed:
        if needed:
            for name in ("lists/partial", "cache/archives/partial", "debs"):
                (made / name).mkdir(parents=True)
            (made / "status").touch()
            options = (
                *(
                    "APT::Architecture=arm64",
                    "APT::Architectures=arm64",
                    f"Dir::Cache={made}/cache",
                ),
                *(f"Dir::State::lists={made}/lists", f"Dir::State::status={made}/status"),
            )
            apt = ("apt-get", *(word for option in options for word in ("-o", option)))
            log = made / "log"
            environment.run("apt-get update, of arm64", (*apt, "update"), log)
            fetch = (*apt, "download", *INTERPRETER)
            environment.run("downloading an interpreter", fetch, log, made / "debs")
            for package in sorted((made / "debs").glob("*.deb")):
                unpack = ("dpkg-deb", "--extract", str(package), str(made / "root"))
                environment.run(f"unpacking {package.name}", unpack, log)
            shutil.rmtree(made / "cache")
            shutil.rmtree(made / "lists")
    return made / "root"


def _site() -> Path:
    """Return a directory with the locked packages that the tests import, made if need be."""
    pinned: dict[str, str] = {}
    for name in LOCKS:
        lock = (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8")
        pinned.update(re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE))
    wanted = [f"{name}=={pinned[name]}" for name in PACKAGES]
    made = (
        environment.where() / f"aarch64-packages-{environment.digest_of(' '.join(wanted).encode())}"
    )
    with environment.making(made) as needed:
        if needed:
            of = [word for name in PLATFORMS for word in ("--platform", name)]
            pip = (str(environment.make() / "bin" / "python"), "-m", "pip", "install")
            options = ("--no-deps", "--only-binary=:all:", "--python-version=3.11", *of)
            command = (*pip, *options, "--target", str(made / "site"), *wanted)
            environment.run("installing packages of aarch64", command, made / "log")
    return made / "site"


def _build(root: Path) -> Path:
    """Build this checkout's kernels for aarch64, only what changed; returns where they import."""
    tools = environment.packages_of("build") / "bin"
    build = environment.BUILD / "aarch64"
    build.mkdir(parents=True, exist_ok=True)
    include = root / "usr" / "include"
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_COMPILER": f"{TRIPLET}-g++",
        "CMAKE_CXX_FLAGS": f"-I{include}",
        "CMAKE_MAKE_PROGRAM": str(tools / "ninja"),
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "Python_EXECUTABLE": str(tools / "python"),
        "Python_INCLUDE_DIR": str(include / "python3.11"),
    }
    cmake = str(tools / "cmake")
    named = [f"-D{name}={value}" for name, value in definitions.items()]
    configure = (cmake, "-S", str(ROOT / "kernels"), "-B", str(build), "-G", "Ninja", *named)
    environment.run("configuring the kernels", configure, build / "log")
    environment.run("compiling the kernels", (cmake, "--build", str(build)), build / "log")
    into = build / "site" / "kvd_kernels"
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(ROOT / "kernels" / "kvd_kernels", into, ignore=shutil.ignore_patterns("*.so"))
    for module in build.glob("_*.so"):
        shutil.copy(module, into / f"{module.name.split('.')[0]}.so")
    return into.parent


if __name__ == "__main__":
    sys.exit(main())
