"""Tiny models: the same bytes each time, kept once, and never half a model."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm import models

ROOT = Path(__file__).resolve().parents[2]


def digests(directory: Path) -> dict[str, str]:
    """Return what the files of a model hold, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


# --- what fails -----------------------------------------------------------------------------------


def test_unknown_name_is_refused_with_those_there_are(tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "vllm" / "models.py")
    command = (sys.executable, script, "gpt", str(tmp_path / "made"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'glm_moe_dsa'" in done.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.usefixtures("cache")
def test_failed_making_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, into: Path, **_: object) -> None:
        (into / "config.json").touch()
        raise OSError("no space left")

    monkeypatch.setattr(models, "write", broken)
    with pytest.raises(OSError, match="no space left"):
        models.model("llama")
    assert not [path for path in cache.rglob("*") if path.name.startswith("llama")]


def test_model_that_another_made_first_is_taken(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(name: str, into: Path, **_: object) -> None:
        (into / "mine").touch()
        theirs = into.parent / f"llama-{models._digest(models.RECIPES['llama'], {})}"
        theirs.mkdir()
        (theirs / "theirs").touch()

    monkeypatch.setattr(models, "write", overtaken)
    made = models.model("llama")
    assert [path.name for path in made.iterdir()] == ["theirs"]
    assert list(made.parent.iterdir()) == [made]


# --- what is made ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(models.RECIPES))
def test_model_is_the_same_each_time(name: str, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        models.write(name, tmp_path / folder)
    made = digests(tmp_path / "one")
    assert made == digests(tmp_path / "two")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= made.keys()


@pytest.mark.usefixtures("cache")
def test_change_of_a_recipe_is_another_model() -> None:
    plain = models.model("llama")
    assert models.model("llama") == plain
    assert models.model("llama", hidden_size=64) != plain


def test_tokenizer_has_a_token_for_every_byte(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    models.write("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "KV-Cache für 日本\n"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text
    chat = [{"role": "user", "content": "hi"}]
    told = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert told == "user: hi\nassistant: "
