"""Attaching: whoever answers wrongly is refused, in time, and nothing stays open."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine_shim.client import ClientOptions, KvdClient, KvdRefused, LinkState, MemberIdentity
from kvd.wire import attach
from kvd.wire import messages as msg
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, Part
from tests.unit.client.fake_kvd import POOL_BYTES, FakeKvd, raw
from tests.unit.client.waiting import until

Connect = Callable[..., KvdClient]


def held() -> tuple[list[str], list[str]]:
    """Descriptors and mappings of kvd in this process."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}").partition(":[")[0])
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted(links), [line for line in maps if "memfd:" in line]


@pytest.fixture
def nothing_stays(kvd: FakeKvd) -> Iterator[None]:
    """The fake runs before and after; whatever it holds is counted in both."""
    before = held()
    yield
    kvd.hang_up()
    kvd.do(kvd._drop_page)
    until(lambda: held() == before)


def refused(connect: Connect, **changes: object) -> KvdRefused:
    with pytest.raises(KvdRefused) as caught:
        connect(**changes)
    return caught.value


# Before anything is sent ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("deadline_s", -1.0),
        ("deadline_s", float("nan")),
        ("connect_deadline_s", float("inf")),
        ("resend_s", 0.0),
        ("requests_max", 0),
        ("window", 0),
        ("spin_us", -1),
        ("backoff_min_s", 2.0),
    ],
)
def test_option_out_of_range_names_itself(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        ClientOptions(**{field: value})  # type: ignore[arg-type]


LAYOUT = BlockLayoutSpec("m", "f16", 4, [[Part("main", 8)]])
DEVICE = DeviceLayout(4, 1, [0, 64], [0, 0], [[]])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_slots": -1}, "num_slots"),
        ({"memory_fd": 3}, "memory_bytes"),
        ({"memory_bytes": 3}, "memory_fd"),
        ({"num_slots": 3, "device": DEVICE}, "describes 2 slots"),
        ({"num_slots": 2, "device": DEVICE}, "memory_fd is missing"),
        ({"layout": LAYOUT, "shard": 1}, "shard must be 0 to 0"),
        ({"store": "s" * 257}, "store has 257 characters, over 256"),
        ({"about": {f"k{n}": "" for n in range(17)}}, "about has 17 entries, over the limit of 16"),
        ({"about": {"why": "x" * 201}}, "about 'why' has 201 characters, over the limit of 200"),
        ({"about": {"a b": ""}}, "about has the key 'a b', which is not 1 to 128 letters"),
        ({"about": {"k" * 129: ""}}, "which is not 1 to 128 letters"),
        ({"about": {"": "x"}}, "about has the key '', which is not"),
    ],
)
def test_identity_that_contradicts_itself_names_the_field(
    changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        MemberIdentity("e", "w", **changes)  # type: ignore[arg-type]


def test_what_a_member_says_of_itself_goes_with_each_hello(connect: Connect, kvd: FakeKvd) -> None:
    about = {"offload": "rolling: 6 layers on 4 buffers", "why": "x" * 200}
    connect(store="local", about=about)
    kvd.hang_up()
    until(lambda: len(kvd.hellos) == 2)
    assert [(hello.store, hello.about) for hello in kvd.hellos] == [("local", about)] * 2


def test_incarnation_is_new_for_each_identity() -> None:
    assert MemberIdentity("e", "w").incarnation != MemberIdentity("e", "w").incarnation


@pytest.mark.parametrize("path", ["relative", "/tmp/" + "x" * 100])
def test_unusable_directory_is_refused_at_once(path: str) -> None:
    with pytest.raises(KvdRefused) as caught:
        KvdClient(MemberIdentity("e", "w"), path)
    assert caught.value.code == "runtime_dir_unusable"
    assert path in str(caught.value)


# Nobody, or the wrong one, answers ------------------------------------------------------------


def test_no_daemon_is_unreachable_at_the_deadline(tmp_path: Path) -> None:
    client = KvdClient(MemberIdentity("e", "w"), str(tmp_path))
    with pytest.raises(KvdRefused) as caught:
        client.open(0.05)
    assert caught.value.code == "unreachable"
    assert str(tmp_path / "attach.sock") in str(caught.value)
    assert "No such file" in str(caught.value)
    assert client.state is LinkState.CLOSED
    with pytest.raises(KvdRefused, match="closed"):
        client.open()


def test_daemon_that_comes_later_is_found(
    directory: Path, connect: Connect, kvds: list[FakeKvd]
) -> None:
    kvds[0].stop()
    for name in ("attach.sock", "engine.sock"):
        (directory / name).unlink()
    opened: list[KvdClient] = []
    thread = threading.Thread(target=lambda: opened.append(connect()))
    thread.start()
    kvds.append(FakeKvd(directory))
    thread.join()
    assert opened[0].state is LinkState.ATTACHED


def test_server_of_another_user_is_not_trusted(
    connect: Connect, kvd: FakeKvd, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.getuid()
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: b"\1\0\0\0" + b"\7\0\0\0" * 2)
    error = refused(connect)
    assert error.code == "server_untrusted"
    assert "uid 7" in str(error)
    assert not kvd.attaches  # nothing was said, no memory handed out
    assert connect(trusted_uids=(7,)).state is LinkState.ATTACHED
    assert uid == os.getuid()


@pytest.mark.usefixtures("nothing_stays")
def test_server_that_never_answers_is_given_up(connect: Connect, kvd: FakeKvd) -> None:
    kvd.on_attach = lambda message: None
    error = refused(connect, attempt_s=0.02, connect_deadline_s=0.1)
    assert error.code == "deadline_exceeded"
    assert "attach.sock" in str(error)
    assert len(kvd.attaches) > 1


@pytest.mark.usefixtures("nothing_stays")
def test_hello_that_is_never_answered_is_given_up(connect: Connect, kvd: FakeKvd) -> None:
    kvd.silent_on(msg.Hello)
    error = refused(connect, attempt_s=0.02, connect_deadline_s=0.1)
    assert error.code == "deadline_exceeded"
    assert "hello" in str(error)
    assert len(kvd.hellos) > 1


@pytest.mark.usefixtures("nothing_stays")
def test_end_of_the_connection_instead_of_a_hello(connect: Connect, kvd: FakeKvd) -> None:
    def hang_up(frame: msg.Hello) -> None:
        kvd._hang_up()

    kvd.on(msg.Hello, hang_up)
    error = refused(connect, connect_deadline_s=0.1)
    assert error.code == "unreachable"
    assert "before it answered the hello" in str(error)


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize(
    ("reply", "code", "says"),
    [
        (b"\xc1", "frame_malformed", ""),
        (raw(["member", 1]), "op_unknown", "member"),
        (raw(["attached", 1]), "frame_malformed", ""),
        (attach.Mapped(1), "frame_malformed", "something else"),
        (attach.Attached(9, bytes(16), bytes(16), 0, 0), "protocol_mismatch", "protocol 9"),
        (attach.Attached(1, bytes(16), bytes(16), 0, 0), "frame_malformed", "2 slots"),
        (attach.Attached(1, bytes(16), bytes(16), 9, 4096), "frame_malformed", "names 3"),
        (attach.Refused("forbidden", {"uid": "5"}), "forbidden", "uid=5"),
        (attach.Refused("limit_reached", {"value": "9"}), "limit_reached", "value=9"),
        (b"x" * (129 << 10), "frame_malformed", "cut off"),
    ],
)
def test_wrong_or_refusing_answer_ends_it_at_once(
    connect: Connect,
    kvd: FakeKvd,
    reply: attach.AttachReply | bytes,
    code: str,
    says: str,
) -> None:
    kvd.on_attach = lambda message: reply
    error = refused(connect)
    assert error.code == code
    assert says in str(error)
    assert len(kvd.attaches) == 1


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (
            lambda no, boot: msg.HelloOk(no, boot, 9, 0, 0, [0, 0], 0, 1 << 20, 9),
            "protocol_mismatch",
        ),
        (lambda no, boot: msg.HelloOk(no, boot, 1, 0, 0, [0], 0, 1 << 20, 9), "frame_malformed"),
        (lambda no, boot: msg.HelloOk(no, boot, 1, 0, 0, [0, 0], 0, 9, 9), "frame_malformed"),
        (lambda no, boot: msg.Done(no, boot), "frame_malformed"),
        (lambda no, boot: b"\xc1", "frame_malformed"),
        (lambda no, boot: msg.Error(no, boot, "layout_mismatch"), "layout_mismatch"),
        (lambda no, boot: msg.Error(no, boot, "hash_probe_mismatch"), "hash_probe_mismatch"),
    ],
)
def test_wrong_or_refusing_hello_ends_it_at_once(
    connect: Connect,
    kvd: FakeKvd,
    reply: Callable[[int, bytes], msg.ServerFrame | bytes],
    code: str,
) -> None:
    kvd.on(msg.Hello, lambda frame: reply(frame.request_no, kvd.boot_id))
    assert refused(connect).code == code
    assert len(kvd.hellos) == 1


@pytest.mark.usefixtures("nothing_stays")
def test_gate_page_of_another_life_is_not_used(connect: Connect, kvd: FakeKvd) -> None:
    kvd.page_boot_id = bytes(16)
    error = refused(connect)
    assert error.code == "frame_malformed"
    assert "another life" in str(error)
    assert not kvd.hellos


def test_hello_answered_by_another_life_is_tried_again(connect: Connect, kvd: FakeKvd) -> None:
    def first(frame: msg.Hello) -> msg.ServerFrame:
        kvd.as_usual(msg.Hello)
        return msg.HelloOk(frame.request_no, bytes(16), 1, 0, 0, [0, 0], 0, 1 << 20, 9)

    kvd.on(msg.Hello, first)
    assert connect().state is LinkState.ATTACHED
    assert len(kvd.hellos) == 2


def test_lack_of_descriptors_is_waited_out(
    connect: Connect, kvd: FakeKvd, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lacks = os.pidfd_open, [True, True]

    def scarce(pid: int) -> int:
        if lacks:
            lacks.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", scarce)
    assert connect().state is LinkState.ATTACHED
    assert not lacks


def test_client_is_opened_once(connect: Connect) -> None:
    client = connect()
    with pytest.raises(RuntimeError, match="before"):
        client.open()
    with client as same:
        assert same is client


@pytest.mark.parametrize("code", ["starting", "stopping", "busy", "engine_busy", "unauthorized"])
def test_what_may_pass_is_tried_again(connect: Connect, kvd: FakeKvd, code: str) -> None:
    def first(message: attach.AttachMember) -> attach.AttachReply:
        kvd.on_attach = None
        return attach.Refused(code)

    kvd.on_attach = first
    assert connect().state is LinkState.ATTACHED
    assert len(kvd.attaches) == 2


def test_starting_daemon_is_named_when_the_deadline_comes(connect: Connect, kvd: FakeKvd) -> None:
    kvd.on_attach = lambda message: attach.Refused("starting", {"percent": "40"})
    error = refused(connect, connect_deadline_s=0.05)
    assert error.code == "starting"
    assert "percent=40" in str(error)


# What an attach brings ------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_stays")
def test_attach_brings_memory_and_close_gives_all_of_it_back(
    connect: Connect, kvd: FakeKvd
) -> None:
    with connect() as client:
        assert client.pool is not None
        assert client.pool.size == POOL_BYTES
        assert client.pool.writable
        assert (client.num_blocks, client.block_stride) == (4, 4096)
        assert client.generation == 1
        assert client.boot_id == kvd.boot_id
    assert client.state is LinkState.CLOSED
    client.close()


def test_member_without_slots_and_kvd_without_pool(connect: Connect, kvd: FakeKvd) -> None:
    kvd.pool_bytes = 0
    client = connect(num_slots=0, is_scheduler=True)
    assert client.pool is None
    assert kvd.hellos[0].is_scheduler
    with pytest.raises(KvdRefused, match="slot 0 is outside the 0 slots"):
        client.slots.acquire(0)


def test_pool_that_is_only_to_be_read_is_mapped_so(connect: Connect, kvd: FakeKvd) -> None:
    readonly = os.open(f"/proc/self/fd/{kvd._pool_fd}", os.O_RDONLY)
    whole, kvd._pool_fd = kvd._pool_fd, readonly
    client = connect()
    assert client.pool is not None
    assert not client.pool.writable
    os.close(whole)


def test_attach_says_who_we_are_and_hands_over_the_memory(connect: Connect, kvd: FakeKvd) -> None:
    fd = os.memfd_create("slots")
    os.ftruncate(fd, 8192)
    client = connect(device=DEVICE, memory_fd=fd, memory_bytes=8192, layout=LAYOUT, kv_port=5)
    os.close(fd)
    said = kvd.attaches[0]
    assert (said.engine, said.member, said.num_slots, said.device_bytes) == ("e0", "w0", 2, 8192)
    assert said.incarnation == client.identity.incarnation
    hello = kvd.hellos[0]
    assert (hello.layout, hello.device, hello.kv_port, hello.slots) == (LAYOUT, DEVICE, 5, [])


def test_close_while_attaching_ends_it(directory: Path, kvd: FakeKvd) -> None:
    kvd.on_attach = lambda message: None
    client = KvdClient(MemberIdentity("e", "w"), str(directory))
    errors: list[KvdRefused] = []

    def opening() -> None:
        try:
            client.open()
        except KvdRefused as error:
            errors.append(error)

    thread = threading.Thread(target=opening)
    thread.start()
    until(lambda: bool(kvd.attaches))
    client.close()
    thread.join()
    assert client.state is LinkState.CLOSED
    assert [error.code for error in errors] == ["closed"]


def test_close_before_open_leaves_nothing(directory: Path) -> None:
    before = held()
    with closing(KvdClient(MemberIdentity("e", "w"), str(directory))):
        pass
    assert held() == before
