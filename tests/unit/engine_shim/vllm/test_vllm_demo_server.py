"""The demo's side of a server: an answer counts only when it came to its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engine_shim.reference.demo.run import free_port
from engine_shim.vllm.demo.server import ServerFailed, VllmServer, write_model

pytestmark = pytest.mark.slow

PROGRAM = """#!{python}
import http.server
import sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        self.send_response({status})
        self.end_headers()
        self.wfile.write({said!r})

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
FIRST = {"choices": [{"token_ids": [5], "finish_reason": None}]}
LAST = {"choices": [{"token_ids": [6], "finish_reason": "length"}]}
COUNT = {"choices": [], "usage": USAGE}


def events(*documents: object, end: str = "data: [DONE]\n\n") -> bytes:
    """A stream of server-sent events."""
    return ("".join(f"data: {json.dumps(one)}\n\n" for one in documents) + end).encode()


def server(tmp_path: Path, said: bytes, status: int = 200) -> VllmServer:
    """A server whose every answer is the same."""
    program = tmp_path / "python"
    text = PROGRAM.format(python=sys.executable, said=said, status=status)
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    return VllmServer("one", str(program), tmp_path, free_port())


def test_whole_answer_has_its_tokens_and_what_was_found(tmp_path: Path) -> None:
    with server(tmp_path, events(FIRST, LAST, COUNT)) as one:
        one.wait_ready(print)
        done = one.complete("text", 2)
    assert (done.tokens, done.num_prompt, done.num_cached) == ((5, 6), 9, 8)
    assert done.finish == "length"


@pytest.mark.parametrize(
    ("said", "status", "message"),
    [
        (events(FIRST, end=""), 200, "server one broke off a request after 1 tokens"),
        (events(FIRST, LAST, end=""), 200, "server one broke off a request after 2 tokens"),
        (events(FIRST, COUNT), 200, "server one broke off a request after 1 tokens"),
        (events(COUNT), 200, "server one broke off a request after 0 tokens"),
        (events(FIRST, {"error": {"code": 500}}), 200, "server one ended a request: .*500"),
        (b"no room", 503, "server one answered 503: no room"),
    ],
)
def test_answer_without_its_end_is_none(
    said: bytes, status: int, message: str, tmp_path: Path
) -> None:
    with server(tmp_path, said, status) as one:
        one.wait_ready(print)
        with pytest.raises(ServerFailed, match=message):
            one.complete("text", 2)


def test_server_that_is_gone_is_said(tmp_path: Path) -> None:
    with server(tmp_path, b"") as one:
        one.wait_ready(print)
        one.kill()
        with pytest.raises(ServerFailed, match="server one broke off a request"):
            one.complete("text", 2)


def test_server_that_ends_at_its_start_is_said_with_its_last_words(tmp_path: Path) -> None:
    with (
        VllmServer("one", sys.executable, tmp_path, free_port(), "--no-such-option") as one,
        pytest.raises(ServerFailed, match=r"one ended with code 1 at its start\n.*No module named"),
    ):
        one.wait_ready(print)


def test_server_that_never_serves_has_a_deadline(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 100\n", encoding="utf-8")
    program.chmod(0o755)
    with (
        VllmServer("one", str(program), tmp_path, free_port()) as one,
        pytest.raises(ServerFailed, match="server one does not serve after 0 s"),
    ):
        one.wait_ready(print, 0.0)


def test_interpreter_that_cannot_make_the_model_is_named() -> None:
    with pytest.raises(ServerFailed, match=r"the model could not be made with .*false"):
        write_model("/bin/false", Path("nowhere"), 0)
