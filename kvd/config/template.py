"""Write the documents that are made from the models.

python -m kvd.config.template > etc/kvd.toml
python -m kvd.config.template --limits > docs/limits.md
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Final

from kvd.config.keys import Key, all_keys, section_model, write_text, write_toml

_COLUMNS: Final = 100

_FILE_HEADER: Final = """\
# Configuration of kvd: every key, with its meaning and its default value.
#
# To set a key, remove the "#" at the start of its line and change the value. Sizes and durations
# carry their unit: "64GiB", "30s". Each key can also be set by the environment (KVD_POOL_SIZE for
# pool.size) and by `kvd --set pool.size=64GiB`; the command line goes before the environment, the
# environment before this file. `kvd --check-config` reports everything wrong at once, and
# `kvctl config` shows each value with its origin. A reload is SIGHUP (`systemctl reload kvd`): keys
# that only a restart applies are named in the log then, and a file with a mistake changes nothing.
#
# Made by `python -m kvd.config.template`; the descriptions live in kvd/config/model.py.
"""

_LIMITS_HEADER: Final = """\
# Limits

Made by `python -m kvd.config.template --limits` from the models in `kvd/config`; change them there.

Every table, queue and batch has a size set at start. A limit never grows by itself. What is too
many gets the answer in the last column and changes nothing; what was admitted before goes on.
`busy` may be tried again after a pause; `limit_reached` names the key to raise. Limits take effect
at the next start unless the table says otherwise.

| key | default | allowed | meaning, and what happens at the limit |
|---|---|---|---|
"""

# Bounds that belong to the section of what they bound.
_OTHER_LIMITS: Final = ("server.frame_size_max", "pool.block_count_max", "regions.size_max")


def config_template() -> str:
    """Return the text of `etc/kvd.toml`: every key commented out, at its default."""
    parts = [_FILE_HEADER]
    section = ""
    for key in all_keys():
        if key.section != section:
            section = key.section
            title = (section_model(section).__doc__ or "").splitlines()[0]
            parts.append(f"\n{_comment(title)}[{section}]\n")
        parts.append("\n" + _setting(key))
    return "".join(parts)


def limits_document() -> str:
    """Return the text of `docs/limits.md`: one row for each limit."""
    rows = [key for key in all_keys() if key.section == "limits" or key.path in _OTHER_LIMITS]
    rows.sort(key=lambda key: key.section != "limits")
    return _LIMITS_HEADER + "".join(_limit_row(key) for key in rows)


def _setting(key: Key) -> str:
    when = "applied by a reload" if key.reloadable else "applied at the next start"
    allowed = f"Allowed: {key.rule}; {when}."
    return (
        _comment(key.description)
        + _comment(allowed)
        + f"#{key.name} = {write_toml(key, key.default)}\n"
    )


def _comment(text: str) -> str:
    lines = textwrap.wrap(text, _COLUMNS - 2, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)


def _limit_row(key: Key) -> str:
    allowed = key.rule.removeprefix("between ").replace(" and ", " to ")
    meaning = key.description + (" Applied by a reload." if key.reloadable else "")
    return f"| `{key.path}` | {write_text(key, key.default)} | {allowed} | {meaning} |\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one of the documents to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m kvd.config.template", description="Write etc/kvd.toml or docs/limits.md."
    )
    parser.add_argument("--limits", action="store_true", help="write docs/limits.md instead")
    chosen = parser.parse_args(arguments)
    sys.stdout.write(limits_document() if chosen.limits else config_template())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
