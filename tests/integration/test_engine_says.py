"""An engine says what it does and which store it wants; kvctl shows it, in every life of kvd."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_shim.client import ClientOptions, KvdClient, KvdRefused, MemberIdentity
from kvd.wire import messages as msg
from tests.integration.live_kvd import LiveKvd, until
from tests.integration.raw_frames import LAYOUT, Attach, RawMember, attaching, refusal

ROOT = Path(__file__).parents[2]
ABOUT = {
    "offload": "rolling: 6 layers on 4 buffers (layer 0 bound, 3 shared), "
    "256 blocks instead of 170",
    "why": "asked for by the connector",
    "model": "m",
}
OPTIONS = ClientOptions(deadline_s=10.0, connect_deadline_s=10.0, spin_us=0)


@pytest.fixture(scope="module")
def kvd() -> Iterator[LiveKvd]:
    with LiveKvd("store.names=local,fast", "store.default=fast") as made:
        yield made


@pytest.fixture
def attach(kvd: LiveKvd) -> Iterator[Attach]:
    with attaching(kvd) as attach:
        yield attach


def kvctl(kvd: LiveKvd, *arguments: str) -> str:
    """What it writes, whether or not the node is degraded."""
    command = [sys.executable, "-m", "kvd.cli.kvctl", "--runtime-dir", str(kvd.runtime_dir)]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (0, 4), done.stderr
    return done.stdout


def engines(kvd: LiveKvd) -> list[dict[str, Any]]:
    found = kvd.get("/v1/engines")[1]["items"]
    assert isinstance(found, list)
    return found


# Shown --------------------------------------------------------------------------------------------


def test_what_an_engine_says_is_shown(kvd: LiveKvd, attach: Attach) -> None:
    attach("e0").hello(LAYOUT, store="local", about=ABOUT)
    attach("e1").hello(LAYOUT)
    said, silent = engines(kvd)
    assert (said["store"], said["about"]) == ("local", ABOUT)
    assert (said["members"][0]["store"], said["members"][0]["about"]) == ("local", ABOUT)
    assert (silent["store"], silent["about"]) == ("fast", {})
    assert [one["about"] for one in kvd.status()["engines"]] == [ABOUT, {}]

    shown = kvctl(kvd, "engines").splitlines()
    assert shown[0].startswith("e0  tp 1  0 requests  store local  ")
    assert f"  offload  {ABOUT['offload']}" in shown
    assert f"  why      {ABOUT['why']}" in shown
    assert "  model    m" in shown
    (line,) = [line for line in kvctl(kvd, "status").splitlines() if "rolling" in line]
    assert line == f"e0  offload {ABOUT['offload']}; why {ABOUT['why']}"


def test_nothing_that_an_engine_says_moves_the_cursor(kvd: LiveKvd, attach: Attach) -> None:
    evil = "\x1b[2J\x1b]0;title\x07\x9b31m\r\n\u202eslot"
    attach().hello(LAYOUT, about={"offload": evil, "why": f"[bold]{evil}"})
    for arguments in (
        ("engines",),
        ("status",),
        ("engines", "-o", "json"),
        ("status", "-o", "json"),
    ):
        shown = kvctl(kvd, *arguments)
        assert all(char.isprintable() or char == "\n" for char in shown), arguments
        assert "?[2J?]0;title??31m???slot" in shown
        assert "[bold]?[2J" in shown


def test_a_member_that_attaches_again_may_say_something_else(kvd: LiveKvd) -> None:
    first = RawMember(kvd.runtime_dir, "e", "w")
    first.hello(LAYOUT, about={"offload": "off"})
    with RawMember(kvd.runtime_dir, "e", "w", incarnation=first.incarnation) as again:
        assert engines(kvd)[0]["about"] == {}  # it has not said hello yet
        again.hello(LAYOUT, about={"offload": "rolling"})
        assert engines(kvd)[0]["about"] == {"offload": "rolling"}
    first.close()


# Refused ------------------------------------------------------------------------------------------


def test_a_store_that_there_is_not(kvd: LiveKvd, attach: Attach) -> None:
    client = attach()
    error = refusal(lambda: client.hello(LAYOUT, store="slow"))
    assert error.code == "store_unknown"
    assert error.context == {"engine": "e", "store": "slow", "names": "local, fast"}
    assert kvd.status()["engines_total"] == 0
    assert kvd.refused("frames.store_unknown") == 1
    client.hello(LAYOUT, store="fast")


def test_an_engine_reads_which_stores_there_are(kvd: LiveKvd) -> None:
    identity = MemberIdentity("e", "w", store="slow")
    with pytest.raises(KvdRefused) as caught:
        KvdClient(identity, str(kvd.runtime_dir), OPTIONS).open()
    assert str(caught.value) == (
        "store_unknown: the engine asks for store 'slow', its node has local, fast. "
        "Add it to store.names in kvd.toml, or take `backend` out of the engine's connector."
    )


@pytest.mark.parametrize(
    ("about", "detail"),
    [
        ({f"k{n}": "x" for n in range(17)}, "about has 17 entries, over the limit of 16"),
        ({"why": "x" * 201}, "about 'why' has 201 characters, over the limit of 200"),
    ],
    ids=["entries", "characters"],
)
def test_one_more_than_may_be_said(
    kvd: LiveKvd, attach: Attach, about: dict[str, str], detail: str
) -> None:
    client = attach()
    error = refusal(lambda: client.hello(LAYOUT, about=about))
    assert (error.code, error.context) == ("frame_malformed", {"detail": detail})
    assert kvd.status()["engines_total"] == 0
    most = {f"{n:0128}": "x" * 200 for n in range(16)}
    client.hello(LAYOUT, about=most)
    assert engines(kvd)[0]["about"] == most


@pytest.mark.parametrize("key", ["", "a b", "k" * 129, "a\x1b"])
def test_keys_that_are_no_names(attach: Attach, key: str) -> None:
    client = attach()
    assert refusal(lambda: client.hello(LAYOUT, about={key: "x"})).code == "frame_malformed"
    assert client.code(msg.Stats(*client.head(), {})) == "engine_unknown"


# Lives of kvd -------------------------------------------------------------------------------------


def test_the_next_life_of_kvd_is_told_again(kvd: LiveKvd) -> None:
    identity = MemberIdentity("e", "w", is_scheduler=True, store="local", about=ABOUT)
    with KvdClient(identity, str(kvd.runtime_dir), OPTIONS):
        assert engines(kvd)[0]["about"] == ABOUT
        kvd.stop(signal.SIGKILL)
        kvd.start()
        until(lambda: engines(kvd), "the engine comes back")
        assert (engines(kvd)[0]["store"], engines(kvd)[0]["about"]) == ("local", ABOUT)
