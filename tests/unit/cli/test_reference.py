"""The document of all commands is what the commands say, and shells complete them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from homeprefixd.cli import reference
from homeprefixd.cli.main import cli

ROOT = Path(__file__).parents[3]


def test_the_document_is_what_the_commands_say() -> None:
    """In a process of its own: what a command's help has been asked for before shows in it."""
    command = [sys.executable, "-m", "homeprefixd.cli.reference", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_it_has_every_command() -> None:
    text = reference.reference()
    for name in cli.commands:
        assert f"\n## homeprefixd {name}\n" in text
    assert "\n## homeprefixd bench explain\n" in text
    assert "--apply" in text


def test_the_check_fails_where_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "FILE", tmp_path / "REFERENCE.md")
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    (tmp_path / "REFERENCE.md").write_text("old")
    assert reference.main(["--check"]) == 1
    assert "run `python -m homeprefixd.cli.reference`" in capsys.readouterr().err


def complete(*words: str) -> set[str]:
    """What a shell is offered for the last word."""
    done = subprocess.run(
        [sys.executable, "-m", "homeprefixd"],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "_HOMEPREFIXD_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["homeprefixd", *words]),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return {line.partition(",")[2] for line in done.stdout.splitlines()}


def test_commands_and_options_are_completed() -> None:
    assert complete("ex") == {"export", "explain"}
    assert complete("bench", "exp") == {"explain"}
    assert complete("explain", "--app") == {"--apply"}
    assert complete("serve", "--mod") == {"--model"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(shell: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "_HOMEPREFIXD_COMPLETE": f"{shell}_source"}
    script = subprocess.run(
        [sys.executable, "-m", "homeprefixd"], env=environment, capture_output=True, text=True, timeout=30
    )
    assert script.returncode == 0, script.stderr
    assert f"_HOMEPREFIXD_COMPLETE={shell}_complete" in script.stdout
    if shell == "bash" and shutil.which("bash") is not None:
        (tmp_path / "script").write_text(script.stdout)
        told = subprocess.run(
            ["bash", "--norc", "-c", f". {tmp_path / 'script'} && complete -p homeprefixd"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert "-F _homeprefixd_completion homeprefixd" in told.stdout, told.stderr
