"""The file of API keys, and namespaces derived from a secret."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from homeprefixd.api.keyring import SECRET_FILE, KeyRing, keys_file, read_keys, secret_in
from homeprefixd.errors import ConfigError

LONG = "0123456789abcdef"


def entry(name: str = "a", key: str = LONG, more: str = "") -> str:
    return f'[[key]]\nname = "{name}"\nkey = "{key}"\n{more}\n'


def test_a_key_may_be_given_by_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    digest = hashlib.sha256(LONG.encode()).hexdigest()
    file.write_text(f'[[key]]\nname = "a"\nsha256 = "{digest.upper()}"\n')
    ring = KeyRing(file)
    found = ring.find(LONG)
    assert found is not None
    assert found.name == "a"
    assert ring.find(digest) is None
    assert ring.find("") is None


def test_shares_of_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry() + entry("guest", LONG[::-1], "cache_share = 10"))
    ring = KeyRing(file)
    assert ring.shares() == {"guest": 10}
    file.write_text(entry())
    ring.reload()
    assert ring.shares() == {}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("x =", "not TOML"),
        ('[[key]]\nname = "a"\n', "exactly one"),
        (f'{entry()}sha256 = "{"0" * 64}"\n', "exactly one"),
        (entry(key="short"), "16"),
        (entry(key="with a space 0123456"), "spaces"),
        ('[[key]]\nname = "a"\nsha256 = "12"\n', "64"),
        (entry(name=""), "name"),
        (entry() + entry(name="b"), "same key"),
        (entry() + entry(key=LONG[::-1]), "same name"),
        (entry(more='namespace = "mine"'), "namespace"),
        (entry(more='priority = "high"'), "priority"),
        (entry(more="requests = -1"), "requests"),
        (entry(more="colour = 1"), "colour"),
        (entry(more="cache_share = 101"), "cache_share"),
        (entry(more="cache_share = -1"), "cache_share"),
        ("[key]\nname = 1\n", "key"),
    ],
)
def test_what_is_wrong_is_named_without_showing_a_key(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(file)
    assert word in str(caught.value)
    assert str(file) in str(caught.value)
    assert LONG not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.keys_file"):
        read_keys(tmp_path / "none")


def test_a_file_that_everybody_reads_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry())
    for mode, told in ((0o600, False), (0o640, False), (0o644, True)):
        caplog.clear()
        file.chmod(mode)
        read_keys(file)
        assert ("chmod 600" in caplog.text) == told


def test_reload(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry())
    ring = KeyRing(file)
    file.write_text(entry(key=LONG[::-1]))
    ring.reload()
    assert ring.find(LONG) is None
    assert ring.find(LONG[::-1]) is not None
    for bad in ("x =", ""):
        file.write_text(bad)
        with pytest.raises(ConfigError):
            ring.reload()
        assert ring.find(LONG[::-1]) is not None
    KeyRing().reload()


def test_own_namespaces_need_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("a", more='namespace = "own"') + entry("b", LONG[::-1], 'namespace = "own"'))
    one, other = KeyRing(file, lambda: b"1" * 32), KeyRing(file, lambda: b"2" * 32)
    a, b = one.find(LONG), one.find(LONG[::-1])
    assert a is not None
    assert b is not None
    salts = {one.salt(a, ""), one.salt(b, ""), one.salt(a, "b"), other.salt(a, "")}
    assert len(salts) == 4
    assert one.salt(a, "") == KeyRing(file, lambda: b"1" * 32).salt(a, "")
    assert all(len(salt) < 100 for salt in salts)


def test_the_secret_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    secret = secret_in(tmp_path)
    assert len(secret) == 32
    assert secret_in(tmp_path) == secret
    assert (tmp_path / SECRET_FILE).stat().st_mode & 0o077 == 0
    (tmp_path / SECRET_FILE).write_bytes(b"short")
    assert len(secret_in(tmp_path)) == 32
    assert len(secret_in(tmp_path / "not" / "there")) == 32


def test_where_the_keys_are(tmp_path: Path) -> None:
    assert keys_file("", None) is None
    assert keys_file("", str(tmp_path)) is None
    (tmp_path / "api-keys").write_text("")
    assert keys_file("", str(tmp_path)) == tmp_path / "api-keys"
    assert keys_file("/x/keys.toml", str(tmp_path)) == Path("/x/keys.toml")
    assert not KeyRing(tmp_path / "api-keys")
