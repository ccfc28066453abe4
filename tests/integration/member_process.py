"""Members in processes of their own, to be killed: a nursery that forks them when it is told to.

`python -m tests.integration.member_process` reads one JSON order a line and answers with one line:
the pid of a child once it has got as far as it was told. It forks, so that a member costs
milliseconds instead of an interpreter's start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import zmq

from bench.wire_client import WireClient
from kvd.wire import messages as msg
from kvd.wire.layout import DeviceLayout, SlotArea
from kvd.wire.slot_items import AcquiredItem, ComputedItem, SaveEndedItem, SaveItem, WrittenItem
from tests.integration.raw_frames import LAYOUT, Talker, epochs, pack

ROOT: Final = Path(__file__).parents[2]
NUM_SLOTS: Final = 3
DEVICE_BYTES: Final = 1 << 20

STAGES: Final = ("attached", "hello", "computing", "saving", "pinned", "region", "working")
"""How far a member gets before it waits to be killed; the last one works on and on."""


class Nursery:
    """The process that forks members; ends them and itself when it is closed."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.integration.member_process"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=env, text=True
        )
        self._pids: list[int] = []

    def start(
        self,
        runtime_dir: Path,
        stage: str,
        engine: str = "e",
        *,
        incarnation: int = 0,
        uid: int = 0,
    ) -> int:
        """Fork a member and wait until it is that far; returns its pid.

        Raises: RuntimeError with what it says when it cannot.
        """
        order = {
            "runtime_dir": str(runtime_dir),
            "stage": stage,
            "engine": engine,
            "incarnation": incarnation,
            "uid": uid,
        }
        answer = self._ask(order)
        if "pid" not in answer:
            raise RuntimeError(answer["failed"])
        self._pids.append(answer["pid"])
        return int(answer["pid"])

    def talk(self, runtime_dir: Path, uid: int) -> str:
        """Send a frame to engine.sock as another user: `answered`, or `cut` off."""
        order = {"runtime_dir": str(runtime_dir), "stage": "talk", "uid": uid}
        return str(self._ask(order)["failed"])

    def kill(self, pid: int) -> None:
        """kill -9 a member, and wait until it is dead."""
        os.kill(pid, signal.SIGKILL)
        self._pids.remove(pid)
        assert self._ask({"reap": pid}) == {"reaped": pid}

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        """Kill everybody."""
        for pid in list(self._pids):
            self.kill(pid)
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# In the nursery -----------------------------------------------------------------------------------


def main() -> None:
    """Obey orders until there are no more."""
    for line in sys.stdin:
        order = json.loads(line)
        if "reap" in order:
            os.waitpid(order["reap"], 0)
            _say({"reaped": order["reap"]})
        else:
            _fork(order)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _fork(order: dict[str, Any]) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.close(0)
        live(order, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.readline().strip()
    if said == "there":
        _say({"pid": pid})
    else:
        os.waitpid(pid, 0)
        _say({"failed": said})


def live(order: dict[str, Any], pipe: int) -> None:
    """A member's life; ends by a signal only."""
    try:
        if order["uid"]:
            os.setuid(order["uid"])
        if order["stage"] == "talk":
            os.write(pipe, _talk(Path(order["runtime_dir"])).encode() + b"\n")
            return
        client = _arrive(order)
        os.write(pipe, b"there\n")
        os.close(pipe)
        while order["stage"] == "working":
            _work(client)
        while True:
            signal.pause()
    except (OSError, RuntimeError) as error:
        os.write(pipe, f"{error!r}\n".encode())
    finally:
        os._exit(1)  # the nursery's code is not this process's to go on with


def _talk(runtime_dir: Path) -> str:
    with Talker(runtime_dir) as talker:
        monitor = talker.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        talker.send(pack(["no_such_op", 1]))
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(talker.socket, zmq.POLLIN)
        ready = dict(poller.poll(10_000))
        talker.socket.disable_monitor()
        monitor.close(linger=0)
    return "answered" if talker.socket in ready else "cut" if monitor in ready else "nothing"


def _arrive(order: dict[str, Any]) -> WireClient:
    """Get as far as the order says."""
    device_fd = os.memfd_create("device", os.MFD_ALLOW_SEALING)
    os.ftruncate(device_fd, DEVICE_BYTES)
    client = WireClient(
        Path(order["runtime_dir"]),
        order["engine"],
        "w",
        num_slots=NUM_SLOTS,
        device_fd=device_fd,
        incarnation=order["incarnation"],
    )
    stage = STAGES.index(order["stage"])
    if stage >= STAGES.index("hello"):
        areas = [[SlotArea("main", 0, 16)]]
        device = DeviceLayout(4, 1, [slot * 4096 for slot in range(NUM_SLOTS)], [0] * 3, areas)
        client.hello(LAYOUT, device=device)
    if stage >= STAGES.index("computing"):
        client.events([AcquiredItem(0, 0)])
    if stage >= STAGES.index("saving"):
        block, *_ = client.reserve("r", 4)
        client.events([WrittenItem(1, 0, 0, [SaveItem("s", [block], [4])]), ComputedItem(1, 0)])
    if stage >= STAGES.index("pinned"):
        client.lookup("q", (1).to_bytes(32, "big"))
    if stage >= STAGES.index("region"):
        region, transfer = f"region-{order['engine']}", f"t-{os.getpid()}"
        client.call(msg.RegionCreate(*client.head(), region, 2, 8, 4, 16))
        client.call(msg.Expect(*client.head(), transfer, region, [0], 4, 1, 60_000))
        client.zmq.send(client.encode(msg.AwaitTransfer(*client.head(), transfer)))
    return client


def _work(client: WireClient) -> None:
    """One turn of everything, to be cut anywhere."""
    epoch = epochs(client)[2]
    (block,) = client.reserve("work", 1)
    client.events(
        [
            AcquiredItem(2, epoch, 0),
            WrittenItem(2, epoch, 0, [SaveItem("s", [block], [4])]),
            SaveEndedItem(2, epoch, "s", True, [4]),
            ComputedItem(2, epoch),
        ]
    )
    client.unpin("work")


if __name__ == "__main__":
    main()
