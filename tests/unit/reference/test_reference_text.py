"""What needs no torch: tokens, prompt files, the built-in text, drafts and block hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from engine_shim.reference.bytes_tokenizer import (
    BOS,
    EOS,
    PAD,
    VOCAB_SIZE,
    decode,
    encode,
    encode_file,
    long_text,
)
from engine_shim.reference.drafts import PromptLookup
from engine_shim.reference.hashing import HASH_BYTES, block_hashes, hash_probe


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; give a UTF-8 text file"),
        (b"", "is empty; give at least one character"),
        (b"ab\0c", r"is binary \(NUL byte at 2\); give text"),
        (b"ab\xff", r"is not UTF-8 \(byte 2\); save it as UTF-8"),
    ],
)
def test_bad_prompt_file_is_one_sentence(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^prompt file {path} {message}$"):
        encode_file(path)


def test_a_directory_is_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a directory; give a UTF-8 text file"):
        encode_file(tmp_path)


def test_a_path_through_a_file_is_no_prompt_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"cannot be read \(Not a directory\)"):
        encode_file(tmp_path / "file" / "prompt.txt")


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_unknown_tokens_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"token is {token}; give 0 to 258"):
        decode([65, token])


@pytest.mark.parametrize("text", ["a", "naïve café\n\tend", "\N{GREEK SMALL LETTER ALPHA}" * 3])
def test_text_survives_its_tokens(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(text, encoding="utf-8")
    assert decode(encode(text)) == text
    assert encode_file(path) == encode(text)


def test_what_cannot_be_shown_is_replaced_and_specials_are_named() -> None:
    assert decode([0x41, 0xFF, 0x1B, BOS, EOS, PAD, 0x42]) == "A��<bos><eos><pad>B"


@pytest.mark.parametrize("num_tokens", [0, 10_000_000])
def test_text_of_impossible_length_is_refused(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"num_tokens is {num_tokens}; give"):
        long_text(num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 999, 50_000])
def test_text_has_the_length_and_repeats(num_tokens: int) -> None:
    text = long_text(num_tokens)
    assert len(encode(text)) == num_tokens
    assert text == long_text(num_tokens)
    assert long_text(50_000).startswith(text)


def test_text_is_varied() -> None:
    paragraphs = long_text(100_000).split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert len({word for paragraph in paragraphs for word in paragraph.split()}) > 2000


@pytest.mark.parametrize(
    ("max_ngram", "min_ngram", "window", "message"),
    [
        (2, 3, 100, "min_ngram is 3"),
        (2, 0, 100, "min_ngram is 0"),
        (4, 1, 4, "window is 4; give more than max_ngram"),
    ],
)
def test_wrong_lookup_is_refused(max_ngram: int, min_ngram: int, window: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptLookup(max_ngram, min_ngram, window)


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([], 3, []),
        ([5], 3, []),
        ([1, 2, 3, 4], 3, []),
        ([1, 2, 9, 9, 1, 2], 0, []),
        ([1, 2, 9, 8, 1, 2], 3, [9, 8, 1]),
        ([1, 2, 9, 8, 1, 2], 1, [9]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, [8, 1]),
        ([6, 1, 2, 7, 5, 1, 2, 8, 6, 1, 2], 2, [7, 5]),
        ([300, 301, 9, 300, 301], 1, [9]),
        ([4, 4, 4, 4], 2, [4]),
    ],
)
def test_lookup_proposes_what_followed(tokens: list[int], count: int, expected: list[int]) -> None:
    assert PromptLookup(max_ngram=3).propose(tokens, count) == expected


def test_lookup_forgets_what_left_its_window() -> None:
    tokens = [1, 2, 9, *range(10, 20), 1, 2]
    assert PromptLookup(window=100).propose(tokens, 1) == [9]
    assert PromptLookup(window=12).propose(tokens, 1) == []


def test_hashes_of_wrong_input_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens is 0"):
        block_hashes([1, 2], 0)
    for token in (-1, 2**32):
        with pytest.raises(ValueError, match=f"token is {token}"):
            block_hashes([1, token], 2)


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_have_hashes(num_tokens: int, num_hashes: int) -> None:
    hashes = block_hashes(list(range(num_tokens)), 4)
    assert [len(value) for value in hashes] == [HASH_BYTES] * num_hashes


def test_a_hash_names_its_whole_prefix() -> None:
    base = block_hashes([*range(12)], 4)
    for place, same in ((0, 0), (5, 1), (11, 2)):
        changed = [*range(12)]
        changed[place] += 100
        equal = [a == b for a, b in zip(block_hashes(changed, 4), base, strict=True)]
        assert equal == [True] * same + [False] * (3 - same)
    assert len(set(block_hashes([7] * 12, 4))) == 3


def test_hashes_are_frozen() -> None:
    """Stored blocks are found again by these bytes."""
    root = hashlib.sha256(b"kvd reference engine block hash v1").digest()
    packed = b"".join(token.to_bytes(4, "little") for token in (1, 258))
    assert block_hashes([1, 258], 2) == [hashlib.sha256(root + packed).digest()]
    assert hash_probe() == block_hashes(range(64), 16)[-1]
    assert hash_probe().hex()[:16] == "b677a4d17747c91c"
