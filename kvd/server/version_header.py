"""The header with which both sides of the admin API tell their version."""

from __future__ import annotations

from typing import Final

VERSION_HEADER: Final = "X-Kvd-Version"
