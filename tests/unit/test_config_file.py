"""A rule that is written into a configuration file: it counts, the daemon starts, and all else is as it was."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from homeprefixd import config_file
from homeprefixd.config_file import apply_rule, by_hand, rule_line
from homeprefixd.config_sources import Flag, load
from homeprefixd.errors import ConfigError

RULE = "sort_tools"


def written(file: Path, rule: str = RULE, setting: str = "on") -> str:
    """The text after the rule was applied; that it counts and changes nothing else is checked."""
    old = tomllib.loads(file.read_bytes().decode().replace("\r\n", "\n"))
    apply_rule(rule, file, setting)
    text = file.read_bytes().decode()
    old.setdefault("stable", {})[rule] = setting
    assert tomllib.loads(text.replace("\r\n", "\n")) == old
    loaded = load(environ={"HOME": str(file.parent)}, config_file=Flag("--config", str(file)))
    assert getattr(loaded.config.stable, rule) == setting
    assert [one.name for one in file.parent.iterdir() if one.name.startswith(".")] == []
    return text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('stable.sort_keys = "on"\n[log]\n', 'stable.sort_keys = "on"\nstable.sort_tools = "on"\n[log]\n'),
        ("[ stable ]\nsort_keys = 'on'\n", "[ stable ]\nsort_tools = \"on\"\nsort_keys = 'on'\n"),
        ('["stable"]\n"sort_tools" = "off"  # mine\n', '["stable"]\n"sort_tools" = "on"  # mine\n'),
        ('[stable]\n\n# about\n[log]\nlevel="info"', '[stable]\nsort_tools = "on"\n\n# about\n[log]\nlevel="info"'),
        ("[stable] # at its end", '[stable] # at its end\nsort_tools = "on"\n'),
        ('[stable]\r\nsort_tools="off" # x\r\n', '[stable]\r\nsort_tools="on" # x\r\n'),
        ("[stable]\r\n[log]\r\n", '[stable]\r\nsort_tools = "on"\r\n[log]\r\n'),
        ('[log]\r\nlevel = "info"\r\n', '[log]\r\nlevel = "info"\r\n\r\n[stable]\r\nsort_tools = "on"\r\n'),
        ("# a\u2028b\n[stable]\n", '# a\u2028b\n[stable]\nsort_tools = "on"\n'),
        ('stable = { sort_tools = "off" } # x\n', 'stable = { sort_tools = "on" } # x\n'),
    ],
)
def test_all_else_stays(tmp_path: Path, before: str, after: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(before.encode())
    assert written(file) == after
    assert written(file) == after  # again changes nothing


@pytest.mark.parametrize(
    "before",
    [
        'stable = { sort_keys = "on" }\n[log]\nlevel = "info"\n',
        "stable = {}\n",
        "stable.sort_keys = 'on'\nstable.move = '^x'\n",
        "[stable]\nmove = '''\\\n[stable]\\\nsort_tools = 1'''\n",
        "[model]\nalias = 'a'\nchat_template = '''\n[stable]\nsort_tools = \"off\"\n{{ x }}'''\n",
        "['stable']\nsort_tools = '''off'''\n",
        '[stable]\nsort_tools = """\\\n  off"""  # kept\n',
    ],
)
def test_any_form_of_the_section(tmp_path: Path, before: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(before)
    text = written(file)
    assert ("# kept" in before) == ("# kept" in text)


def test_a_value_of_several_lines_is_joined(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[stable]\nmove = '''^Step [^\n]*$'''  # steps\n[log]\n")
    apply_rule("move", file, "^Round [^\\n]*$")
    assert tomllib.loads(file.read_text())["stable"]["move"] == "^Step [^\n]*$|^Round [^\\n]*$"
    assert "# steps\n[log]\n" in file.read_text()


def test_a_link_stays_one_and_the_mode_is_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "c.toml", tmp_path / "c.toml"
    real.write_text("[log]\n")
    real.chmod(0o640)
    link.symlink_to("real/c.toml")
    apply_rule(RULE, link)
    assert link.is_symlink()
    assert "sort_tools" in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert os.listdir(tmp_path / "real") == ["c.toml"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owner_and_group_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[log]\n")
    os.chown(file, 65534, 65533)
    file.chmod(0o640)
    apply_rule(RULE, file)
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, 65533, 0o640)


def test_nobody_is_shut_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[log]\n")
    told = os.stat_result([*file.stat()[:4], 4321, *file.stat()[5:]])
    real = Path.stat

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def look(path: Path, **given: bool) -> os.stat_result:
        return told if path.name == "c.toml" else real(path, **given)

    monkeypatch.setattr(Path, "stat", look)
    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(ConfigError, match=r"owner and group.*by hand: \[stable\] / sort_tools = \"on\""):
        apply_rule(RULE, file)
    assert file.read_text() == "[log]\n"
    assert os.listdir(tmp_path) == ["c.toml"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[log\n", "is not TOML"),
        (b"stable = 3\n", "no section"),
        (b"[[stable]]\n", "no section"),
        (b"# \xff\n", "not UTF-8"),
        (b"[nonsense]\n", "nonsense"),
    ],
)
def test_what_cannot_be_written_says_what_to_do(tmp_path: Path, text: bytes, why: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=why) as caught:
        apply_rule("move", file, "^Step")
    assert caught.value.message.endswith(rule_line("move", "^Step"))
    assert str(file) in caught.value.message
    assert file.read_bytes() == text
    assert os.listdir(tmp_path) == ["c.toml"]


def test_a_rule_that_no_daemon_takes_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match="would not be taken"):
        apply_rule("move", file, "(")
    assert file.read_text() == ""
    assert os.listdir(tmp_path) == ["c.toml"]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path, tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(ConfigError, match="by hand"):
            apply_rule(RULE, file)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="by hand"):
        apply_rule(RULE, tmp_path / "loop")


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[log]\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(config_file.os, "fsync", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*by hand"):
        apply_rule(RULE, file)
    assert file.read_text() == "[log]\n"
    assert os.listdir(tmp_path) == ["c.toml"]


def test_only_what_writes_a_rule_reads_the_library() -> None:
    code = "import sys, homeprefixd.daemon, homeprefixd.config_file; print('tomlkit' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "False\n"


TABLE = '[[stable.per_app]]\napp = "Home"\nsort_tools = "on"\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", TABLE),
        ('[stable]\nsort_keys = "on"\n', f'[stable]\nsort_keys = "on"\n\n{TABLE}'),
        (TABLE.replace('"on"', '"off" # no'), TABLE.replace('"on"', '"on" # no')),
        ('[[stable.per_app]]\napp = "home"\n[log]\n', '[[stable.per_app]]\nsort_tools = "on"\napp = "home"\n[log]\n'),
        (
            '[[stable.per_app]]\napp = "A"\n[[stable.per_app]]\napp = "Home"\nmove = "x"\n[log]\n',
            '[[stable.per_app]]\napp = "A"\n[[stable.per_app]]\nsort_tools = "on"\napp = "Home"\nmove = "x"\n[log]\n',
        ),
        (
            'stable.per_app = [{ app = "A", move = "x" }]\n',
            'stable.per_app = [{ app = "A", move = "x" }, { app = "Home", sort_tools = "on" }]\n',
        ),
    ],
)
def test_a_rule_for_one_app(tmp_path: Path, before: str, after: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(before)
    for _ in range(2):  # again changes nothing
        apply_rule(RULE, file, app="Home")
        assert file.read_text() == after
    loaded = load(environ={"HOME": str(tmp_path)}, config_file=Flag("--config", str(file))).config.stable
    assert loaded.sort_tools == "off"
    assert [one.sort_tools for one in loaded.per_app if one.app.lower() == "home"] == ["on"]


@pytest.mark.parametrize(
    "before",
    [
        'stable = { sort_keys = "on" } # x\n[log]\nlevel = "info"\n',
        "stable = {}\n",
        '[log]\nlevel = "info"\n[stable]\nper_app = []  # none\n',
        'stable.sort_keys = "on"\n',
        'stable = { per_app = [{ app = "A", move = "x" }] }\n',
        '[[stable.per_app]]\napp = "A"\n\n[[stable.per_app]] # b\napp = "Home"\n[log]\n',
        '[[stable.per_app]]\r\napp = "Home"\r\nsort_tools = "off"\r\n',
        '[log]\nlevel = "info"',
        "",
    ],
)
@pytest.mark.parametrize(
    "app", ["Home", "tab\tapp", "nbsp\u00a0app", "zero\u200bwidth\u202ertl", "\U000e0041\x7f \\u'\""]
)
def test_an_app_of_any_name_in_any_form_of_the_table(tmp_path: Path, before: str, app: str) -> None:
    """It is written; and who is told to write it by hand, as the file may not be, has the same then."""
    file, mine = tmp_path / "c.toml", tmp_path / "mine.toml"
    for one in (file, mine):
        one.write_bytes(before.encode())
    apply_rule(RULE, file, app=app)
    told = by_hand(RULE, "on", app, before)
    assert told.isprintable()  # in a terminal it can be read, and copied
    mine.write_text(as_told(before, told))
    for one in (file, mine):
        rules = load(environ={"HOME": str(tmp_path)}, config_file=Flag("--config", str(one))).config.stable.per_app
        assert [rule.sort_tools for rule in rules if rule.app == app] == ["on"]


def as_told(text: str, told: str) -> str:
    """What a person does who reads it."""
    lines = text.replace("\r\n", "\n").rstrip().split("\n")
    order, _, added = told.partition(" by hand: ")
    where = [int(number) for number in re.findall(r"lines? (\d+)(?: to (\d+))?", order) for number in number if number]
    first, last = (len(lines), len(lines)) if not where else (where[0] - 1, where[-1])
    if "behind" in order:
        first = last
    return "\n".join([*lines[:first], *added.split(" / "), *lines[last:]]) + "\n"


def test_expressions_of_one_app_are_joined(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for setting in ("^a$", "^b$", "^a$"):
        apply_rule("move", file, setting, app='My "App"')
    loaded = load(environ={"HOME": str(tmp_path)}, config_file=Flag("--config", str(file))).config.stable
    assert [(one.app, one.move) for one in loaded.per_app] == [('My "App"', "^a$|^b$")]
    assert loaded.move == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[stable.per_app]]\nmove = "x"\n', "a table needs app"),
        ('[[stable.per_app]]\napp = "A"\nmove = "("\n', "regular expression"),
        ('[[stable.per_app]]\napp = "A"\nsort_tools = true\n', "allowed: on, off"),
        ('[[stable.per_app]]\napp = "A"\nfreeze_clock = "on"\n', "have no freeze_clock"),
        ('[[stable.per_app]]\napp = "A"\n[[stable.per_app]]\napp = "a"\n', "two tables are for the app"),
        ('[stable]\ncustom = "a"\n[[stable.per_app]]\napp = "A"\ncustom = "(?i)b"\n', "together with"),
    ],
)
def test_what_an_apps_rules_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(environ={"HOME": str(tmp_path)}, config_file=Flag("--config", str(file)))
    assert said in refused.value.message
    assert f"{file}:" in refused.value.message
