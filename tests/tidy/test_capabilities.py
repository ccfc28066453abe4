"""A missing capability fails in CI, and is skipped elsewhere with what mends it."""

from __future__ import annotations

import subprocess

import pytest
from _pytest.outcomes import Failed, Skipped

from tests import capabilities


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_missing_capability_fails_in_ci(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", value)
    with pytest.raises(Failed, match="lacks wings; as root: apt-get install wings"):
        capabilities.lacking("wings", "apt-get install wings")


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_missing_capability_is_skipped_elsewhere(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    if value is not None:
        monkeypatch.setenv("CI", value)
    with pytest.raises(Skipped, match="lacks wings; as root: apt-get install wings"):
        capabilities.lacking("wings", "apt-get install wings")


def test_missing_instructions_are_told_in_ci_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    monkeypatch.delenv("KVD_TEST_PROCESSOR", raising=False)
    with pytest.raises(Skipped, match="NOT TESTED: this processor has no wings"):
        capabilities.processor_lacks("wings")


def test_missing_instructions_fail_for_who_requires_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_TEST_PROCESSOR", "required")
    with pytest.raises(Failed, match="NOT TESTED: this processor has no wings"):
        capabilities.processor_lacks("wings")


def test_missing_program_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    with pytest.raises(Failed, match="the program no-such-program; as root: apt-get install some"):
        capabilities.need_command("no-such-program", "some")


def test_refused_namespace_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    with pytest.raises(Failed, match="the right to make a nonsense namespace"):
        capabilities.need_namespaces("nonsense")


def test_refused_mount_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1 if "sh" in command else 0, "", "not allowed")

    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr(subprocess, "run", refused)
    with pytest.raises(Failed, match=r"the right to mount \(not allowed\); as root: run the tests"):
        capabilities.need_mounts()


def test_present_program_is_found() -> None:
    assert capabilities.need_command("sh", "dash").endswith("/sh")
