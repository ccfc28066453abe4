"""A machine of its own for a real systemd: namespaces over a throw-away copy of the root.

systemd runs as process 1 of a PID namespace, with own mounts, network, host name and control
groups. Its root is an overlay of this machine's: everything installed is there, and what is written
goes to a tmpfs that ends with the machine. Whatever ends the test process ends the machine: the
kernel kills its process 1, and with that all in it.

A booting systemd empties /tmp, sets kernel parameters and makes device nodes. So nothing of this
machine is writable in there: /tmp, /run and /dev are its own, the directories that tests need are
mounted read-only, so are /sys and /proc/sys, and the root of this machine is not even mounted. It
does not boot where that cannot be had (`contained` below); `test_machine.py` checks it from inside
and from outside.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.capabilities import lacking, need_command, need_mounts, need_namespaces
from tests.integration.live_kvd import until

ROOT: Final = Path(__file__).parents[2]
BOOT_SECONDS: Final = 30.0
COMMAND_SECONDS: Final = 60.0

# In a mount namespace: a control group of the machine's own, so that two machines at a time do not
# meet; then the other namespaces, in which the group is the root of the hierarchy.
_OUTER: Final = """
set -eu
mount -t tmpfs -o size=256M kvd-machine "$D"
mkdir "$D/cgroup" "$D/upper" "$D/work" "$D/root"
mount -t cgroup -o none,name=systemd cgroup "$D/cgroup" || mount -t cgroup2 cgroup "$D/cgroup"
mkdir "$D/cgroup/$NAME"
echo $$ > "$D/cgroup/$NAME/cgroup.procs"
umount "$D/cgroup"
exec unshare --net --uts --ipc --cgroup --pid --fork --kill-child sh -c "$INNER"
"""

_INNER: Final = """
set -eu
R="$D/root"
mount -t overlay -o "lowerdir=/,upperdir=$D/upper,workdir=$D/work" overlay "$R"
for path in run tmp var/tmp dev; do mount -t tmpfs -o mode=755 own "$R/$path"; done
chmod 1777 "$R/tmp" "$R/var/tmp"
mkdir "$R/dev/pts" "$R/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$R/dev/pts"
mount -t tmpfs -o mode=1777 shm "$R/dev/shm"
ln -s pts/ptmx "$R/dev/ptmx"
ln -s /proc/self/fd "$R/dev/fd"
for node in null:3 zero:5 full:7 random:8 urandom:9; do
  mknod -m 666 "$R/dev/${node%:*}" c 1 "${node#*:}"
done
mount -t proc proc "$R/proc"
for path in sys sysrq-trigger irq bus fs; do
  [ ! -e "$R/proc/$path" ] || mount --bind "$R/proc/$path" "$R/proc/$path"
  [ ! -e "$R/proc/$path" ] || mount -o remount,bind,ro "$R/proc/$path"
done
mount -t sysfs -o ro sysfs "$R/sys"
mount -t tmpfs -o mode=755 cgroup "$R/sys/fs/cgroup"
mkdir "$R/sys/fs/cgroup/systemd"
mount -t cgroup -o none,name=systemd cgroup "$R/sys/fs/cgroup/systemd" \\
  || mount -t cgroup2 cgroup "$R/sys/fs/cgroup"
: > "$R/etc/fstab"
for unit in $MASKED; do ln -sf /dev/null "$R/etc/systemd/system/$unit"; done
for path in $SHARED; do
  mkdir -p "$R$path"
  mount --bind "$path" "$R$path"
  mount -o remount,bind,ro "$R$path"
done
contained() {
  for path in $SHARED /proc/sys /sys; do
    ! touch "$R$path/kvd-machine-writes" 2> /dev/null || { echo "$path is writable"; return 1; }
  done
}
contained
ip link set lo up || true
drop=-sys_module,-sys_rawio,-sys_time,-sys_boot,-syslog
cd "$R"
pivot_root . mnt
umount -l mnt
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
  setpriv --bounding-set "$drop" --inh-caps "$drop" $INIT
"""

# What a machine without hardware, network or people has no use for.
_MASKED: Final = (
    *("systemd-udevd.service", "systemd-udev-trigger.service", "systemd-timesyncd.service"),
    *("systemd-networkd.service", "systemd-resolved.service", "systemd-logind.service"),
    *("systemd-udevd-control.socket", "systemd-udevd-kernel.socket", "systemd-networkd.socket"),
    *(
        "systemd-sysctl.service",
        "systemd-modules-load.service",
        "systemd-tmpfiles-setup-dev.service",
    ),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer"),
)

_ALL_NAMESPACES: Final = ("-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w")
_OPTIONS: Final = ("--system", "--unit=basic.target", "--log-target=journal")

_CLEAN: Final = """
mount -t tmpfs none "$D"
mount -t cgroup -o none,name=systemd cgroup "$D" || mount -t cgroup2 cgroup "$D"
[ ! -d "$D/$NAME" ] || find "$D/$NAME" -depth -type d -exec rmdir {} +
"""


class Machine:
    """One booted machine; `close` ends it."""

    def __init__(self, scratch: Path) -> None:
        """Boot.

        Args: scratch: an empty directory, where the machine's disks are mounted out of sight.
        Leaves: on a machine that cannot do this, the test ends (see `tests.capabilities`).
        """
        need_command("systemctl", "systemd")
        need_command("nsenter", "util-linux")
        setpriv = need_command("setpriv", "util-linux")
        need_namespaces("net", "mount", "uts", "ipc", "cgroup", "pid")
        need_mounts()
        self._scratch = scratch
        self._name = f"kvd-test-{os.getpid()}-{scratch.name}"
        self._log = scratch.with_name(f"{scratch.name}.log")
        command = (setpriv, "--pdeathsig", "KILL", "unshare", "--mount", "sh", "-c", _OUTER)
        with self._log.open("wb") as log:
            self._outer = subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._init = 0
        try:
            until(self._is_up, "systemd is up", BOOT_SECONDS)
        except AssertionError:
            said = self._log.read_text(errors="replace")[-500:]
            self.close()
            lacking(f"what a systemd of its own needs ({said})", "run the tests with sudo")

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "D": str(self._scratch),
            "NAME": self._name,
            "INNER": _INNER,
            "MASKED": " ".join(_MASKED),
            "SHARED": shlex.join(needed_paths()),
            "INIT": f"/lib/systemd/systemd {shlex.join(_OPTIONS)}",
        }

    def _is_up(self) -> bool:
        assert self._outer.poll() is None, "systemd ended"
        self._init = child_named("systemd", self._outer.pid)
        if not self._init:
            return False
        state = self.run("systemctl", "is-system-running", check=False)
        return state.strip() in ("running", "degraded")

    @property
    def root(self) -> Path:
        """Its root directory, seen from outside."""
        return Path(f"/proc/{self._init}/root")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the machine."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a program inside; returns what it said, both streams.

        Raises: AssertionError: it failed, and check is set.
        """
        done = subprocess.run(
            ("nsenter", "-t", str(self._init), *_ALL_NAMESPACES, "--", *command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        said = done.stdout.decode(errors="replace")
        assert done.returncode == 0 or not check, f"{shlex.join(command)}: {said}"
        return said

    def systemctl(self, *arguments: str) -> str:
        """Run systemctl, which waits for what it starts or stops."""
        return self.run("systemctl", *arguments)

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).strip()

    def journal(self, unit: str) -> list[str]:
        """What a unit and systemd about it wrote, line by line."""
        self.run("journalctl", "--sync")
        return self.run("journalctl", "-u", unit, "-o", "cat", "--no-pager").splitlines()

    def close(self) -> None:
        """End everything in it, and remove its control group."""
        self._outer.kill()
        self._outer.wait()
        until(lambda: not self._init or not Path(f"/proc/{self._init}").exists(), "its end")
        subprocess.run(
            ("unshare", "--mount", "sh", "-c", _CLEAN),
            env={**os.environ, "D": str(self._scratch), "NAME": self._name},
            capture_output=True,
            check=False,
        )
        self._log.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)


def child_named(name: str, parent: int) -> int:
    """Process id of the child of this name, 0 if there is none.

    Before a shell becomes what it starts at last, its children live as long as a `mount` takes:
    each of them may be gone when it is looked at.
    """
    gone = (FileNotFoundError, ProcessLookupError)
    with contextlib.suppress(*gone):
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with contextlib.suppress(*gone):
                if Path(f"/proc/{child}/comm").read_text() == f"{name}\n":
                    return int(child)
    return 0


def needed_paths() -> list[str]:
    """Directories that a kvd of this environment is made of, none inside another.

    They are named one by one: `sys.path` may hold any directory, even one that others write to.
    """
    bases = {Path(sys.prefix), Path(sys.prefix).resolve(), Path(sys.base_prefix), ROOT}
    bases |= {Path(entry) for entry in sys.path if Path(entry).name == "site-packages"}
    found = {base for base in bases if base.is_absolute() and not base.is_relative_to("/usr")}
    kept = [
        path
        for path in sorted(found)
        if not any(path != other and path.is_relative_to(other) for other in found)
    ]
    temporary = Path(tempfile.gettempdir()).resolve()
    for path in kept:
        assert len(path.parts) > 2, f"{path} is too much to share"
        assert not temporary.is_relative_to(path.resolve()), f"{path} holds what others write"
    return [str(path) for path in kept]
