"""Engines that live in their own pid, mount and network namespaces, as in containers."""

from __future__ import annotations

import pytest

from tests.capabilities import need_namespaces
from tests.e2e.pair import a_pair, text

pytestmark = [pytest.mark.slow, pytest.mark.engine]

UNSHARE = ("unshare", "--pid", "--mount", "--net", "--fork", "--kill-child")


def test_both_engines_in_namespaces_of_their_own() -> None:
    """Sockets are files, pids do not match, there is no network: attach and hand-off work."""
    need_namespaces("pid", "mount", "net")
    with a_pair() as pair:
        pair.prefill.stop()
        pair.decode.stop()
        pair.start_prefill(prefix=UNSHARE)
        pair.start_decode(prefix=UNSHARE)
        pair.check("contained", text(skip=6))
        # A death in there is seen out here.
        pair.prefill.kill()
        pair.settled()
        pair.start_prefill(prefix=UNSHARE)
        assert pair.check("again", text(skip=6)).hit_tokens > 0
