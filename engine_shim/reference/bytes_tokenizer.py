"""A byte-level tokenizer, prompt files, and a long English text that every Python carries.

A token is a byte of UTF-8; three special tokens follow. Nothing is added or dropped, so a text of
n ASCII characters has n tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

NUM_BYTES: Final = 256
BOS: Final = 256
EOS: Final = 257
PAD: Final = 258
VOCAB_SIZE: Final = 259

_SPECIAL_NAMES: Final = ("<bos>", "<eos>", "<pad>")
_FIRST_PRINTABLE: Final = 0x20


def encode(text: str) -> list[int]:
    """Return the token ids of a text: its UTF-8 bytes."""
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    """Return tokens as text that can be printed on one screen.

    Bytes that are not UTF-8, and control characters but newline and tab, show as U+FFFD; special
    tokens show by name. Raises ValueError for an id outside the vocabulary.
    """
    pieces: list[str] = []
    run = bytearray()
    for token in tokens:
        if 0 <= token < NUM_BYTES:
            run.append(token)
            continue
        if not NUM_BYTES <= token < VOCAB_SIZE:
            raise ValueError(f"token is {token}; give 0 to {VOCAB_SIZE - 1}")
        pieces += (_printable(run), _SPECIAL_NAMES[token - NUM_BYTES])
        run.clear()
    pieces.append(_printable(run))
    return "".join(pieces)


def _printable(run: bytearray) -> str:
    text = run.decode(errors="replace")
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def encode_file(path: Path) -> list[int]:
    """Return the token ids of a prompt file.

    Raises: ValueError with one sentence if the file is missing, is not a regular file, cannot be
            read, is empty, or is not UTF-8 text.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"prompt file {path} does not exist; give a UTF-8 text file") from None
    except IsADirectoryError:
        raise ValueError(f"prompt file {path} is a directory; give a UTF-8 text file") from None
    except OSError as error:
        reason = error.strerror or "unknown error"
        raise ValueError(f"prompt file {path} cannot be read ({reason}); mend it") from error
    if not raw:
        raise ValueError(f"prompt file {path} is empty; give at least one character")
    if 0 in raw:
        raise ValueError(f"prompt file {path} is binary (NUL byte at {raw.index(0)}); give text")
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"prompt file {path} is not UTF-8 (byte {error.start}); save it as UTF-8"
        ) from None
    return list(raw)


def long_text(num_tokens: int) -> str:
    """Return a real English text of exactly `num_tokens` ASCII characters, so tokens.

    It is the Python language reference as shipped inside every Python (`pydoc_data.topics`), each
    paragraph once: varied prose, no network, and the same for one version of Python.

    Raises: ValueError if num_tokens is below 1 or above what the reference holds (see
            `longest_text`; about 350 000).
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; give 1 or more")
    text: list[str] = []
    size = 0
    for paragraph in _reference_paragraphs():
        text.append(paragraph)
        size += len(paragraph)
        if size >= num_tokens:
            return "".join(text)[:num_tokens]
    raise ValueError(f"num_tokens is {num_tokens}; give {size} or less, the text is no longer")


def longest_text() -> int:
    """Return how many tokens `long_text` has at most; it depends on the version of Python."""
    return sum(map(len, _reference_paragraphs()))


def _reference_paragraphs() -> Iterator[str]:
    """Yield the paragraphs of the language reference, reflowed, each with a blank line after it."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for name in sorted(topics):
        for block in topics[name].split("\n\n"):
            words = block.encode("ascii", errors="ignore").decode().split()
            paragraph = " ".join(words)
            if any(character.isalpha() for character in paragraph) and paragraph not in seen:
                seen.add(paragraph)
                yield paragraph + "\n\n"
