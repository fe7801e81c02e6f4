"""The README tells what is there: commands, flags, settings with defaults, variables, an example that is valid."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from homeprefixd import config_keys, config_sources
from homeprefixd.api.keyring import read_keys
from homeprefixd.cli.main import cli
from homeprefixd.config_sources import Flag
from homeprefixd.errors import ConfigError

README = Path(__file__).parents[3] / "README.md"


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text()


def between(text: str, name: str) -> str:
    return text.split(f"<!-- {name}: begin -->")[1].split(f"<!-- {name}: end -->")[0].strip()


def commands(group: click.Group, above: str = "homeprefixd") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, one in group.commands.items():
        path = f"{above} {name}"
        found |= commands(one, path) if isinstance(one, click.Group) else {path: one}
    return found


def test_help_is_the_help(text: str) -> None:
    printed = CliRunner().invoke(cli, ["--help"], prog_name="homeprefixd", terminal_width=80).output
    assert between(text, "help") == f"```\n{printed.strip()}\n```"


def test_each_command_is_described(text: str) -> None:
    documented = text.split("## Commands")[1].split("## Configuration")[0]
    for path in commands(cli):
        assert f"`{path}" in documented, path


def test_no_command_is_described_that_is_not_there(text: str) -> None:
    there = set(cli.commands)
    for name in re.findall(r"`homeprefixd ([a-z]+)", text):
        assert name in there


def test_every_flag_of_serve_and_purge_is_there(text: str) -> None:
    documented = text.split("## Commands")[1].split("## Configuration")[0]
    for name in ("serve", "purge"):
        for option in cli.commands[name].params:
            if not {"--json", "--yes"} & set(option.opts):
                assert any(f"`{flag}" in documented for flag in option.opts), option.name


def test_settings_and_defaults_are_those_of_the_code(text: str) -> None:
    rows = re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| `(.*?)` \| \S", between(text, "settings"), re.MULTILINE)
    keys = config_keys.keys()
    assert [path for path, _default in rows] == list(keys)
    for path, default in rows:
        assert tomllib.loads(f"x = {default}")["x"] == keys[path].default, path


def test_other_variables_are_listed(text: str) -> None:
    for name in config_sources.OTHER_VARIABLES:
        assert f"* `{name}`: " in text


def test_the_example_configuration_is_valid(text: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", text.replace(between(text, "keys"), ""), re.DOTALL)
    assert blocks
    for block in blocks:
        file = tmp_path / "config.toml"
        file.write_text(block)
        loaded = config_sources.load(environ={"HOME": str(tmp_path)}, config_file=Flag("--config", str(file)))
        assert any(origin.kind == "file" for origin in loaded.origins.values())


def test_the_example_keys_are_valid(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    shown = between(text, "keys").removeprefix("```toml").removesuffix("```")
    file.write_text(shown)
    with pytest.raises(ConfigError, match="openssl rand"):  # nobody is to use a key that stands in a README
        read_keys(file)
    file.write_text(shown.replace("PUT A LONG RANDOM TEXT HERE", "0123456789abcdef"))
    phone, guest = read_keys(file)
    assert (phone.admin, guest.own_namespace, guest.priority) == (True, True, "background")
