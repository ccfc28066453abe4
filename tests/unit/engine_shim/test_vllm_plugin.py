"""The plugin: off unless asked for, and one clear sentence for a vLLM that kvd does not know."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from engine_shim.vllm import plugin
from engine_shim.vllm.errors import UnsupportedEngine


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was installed, in place of what needs vLLM."""
    done: list[str] = []
    fake = ModuleType("engine_shim.vllm.cpu_sparse")
    fake.__dict__["install"] = lambda: done.append("cpu_sparse")
    monkeypatch.setitem(sys.modules, "engine_shim.vllm.cpu_sparse", fake)
    monkeypatch.setattr("engine_shim.vllm.cpu_sparse", fake, raising=False)
    monkeypatch.setattr(plugin, "add_connector", lambda: done.append("connector"))
    return done


def have_vllm(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Make `import vllm` give a module of a version."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0+cpu", "0.320.0", "dev"])
def test_unknown_vllm_is_refused(
    version: str, installs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_vllm(monkeypatch, version)
    monkeypatch.setenv(plugin.SPARSE_ON_CPU, "1")
    with pytest.raises(UnsupportedEngine) as caught:
        plugin.register()
    assert str(caught.value).startswith(f"kvd knows vLLM 0.32.x, this is {version}: install")
    assert not installs


def test_other_value_is_refused(installs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SPARSE_ON_CPU, "yes")
    with pytest.raises(ValueError, match="KVD_CPU_SPARSE is 'yes': set it to 1, or unset it"):
        plugin.register()
    assert not installs


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_vllm_that_kvd_does_not_know_is_left_alone(
    value: str | None, installs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_vllm(monkeypatch, "0.99.0")
    monkeypatch.delenv(plugin.SPARSE_ON_CPU, raising=False)
    if value is not None:
        monkeypatch.setenv(plugin.SPARSE_ON_CPU, value)
    plugin.register()
    assert not installs


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.4"])
def test_sparse_attention_is_installed_where_asked_for(
    version: str, installs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_vllm(monkeypatch, version)
    monkeypatch.setenv(plugin.SPARSE_ON_CPU, "1")
    plugin.register()
    assert installs == ["connector", "cpu_sparse"]


def test_unasked_only_the_connector_is_added(
    installs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_vllm(monkeypatch, "0.32.1")
    monkeypatch.delenv(plugin.SPARSE_ON_CPU, raising=False)
    plugin.register()
    assert installs == ["connector"]
