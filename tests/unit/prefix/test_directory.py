"""directory.py: where a store may live, and whose it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from homeprefixd.errors import StoreError
from homeprefixd.prefix.directory import Directory, filesystem_of, is_network

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:35 / /mnt/nas rw,relatime shared:20 - nfs4 nas:/volume1 rw,vers=4.2
41 40 8:17 / /mnt/nas/local rw,relatime - btrfs /dev/sdb1 rw
42 22 0:36 / /mnt/with\\040space rw - fuse.sshfs me@there: rw
43 22 8:33 / /mnt/usb rw - fuseblk /dev/sdc1 rw
44 22 0:37 / /over rw - ext4 /dev/sdd1 rw
45 22 0:38 / /over rw - cifs //nas/share rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/cache", "ext4", False),
        ("/mnt/nas", "nfs4", True),
        ("/mnt/nas/cache", "nfs4", True),
        ("/mnt/nasty", "ext4", False),
        ("/mnt/nas/local/cache", "btrfs", False),
        ("/mnt/with space/cache", "fuse.sshfs", True),
        ("/mnt/usb/cache", "fuseblk", False),
        ("/over/cache", "cifs", True),
    ],
)
def test_network_filesystems_are_known(path: str, kind: str, network: bool) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind
    assert is_network(kind) == network


def test_a_network_filesystem_is_refused(tmp_path: Path) -> None:
    mounts = f"1 0 0:1 / {tmp_path} rw - nfs4 nas:/ rw\n"
    with pytest.raises(StoreError, match=r"network filesystem \(nfs4\).*--cache-dir"):
        Directory(tmp_path / "cache", create=True, mounts=mounts)


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "a" / "cache", create=True)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory.path / "lock").stat().st_mode) == 0o600
    directory.release(clean=True)


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    first = Directory(tmp_path, create=True)
    with pytest.raises(StoreError, match=f"in use by another homeprefixd \\(process {os.getpid()}\\)"):
        Directory(tmp_path, create=True)
    first.release(clean=True)
    Directory(tmp_path, create=True).release(clean=True)


def test_a_missing_one_is_not_made_where_one_is_expected(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store here"):
        Directory(tmp_path / "cache", create=False)
    assert not (tmp_path / "cache").exists()


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Not a directory"):
        Directory(tmp_path / "file" / "below", create=True)
    with pytest.raises(StoreError, match="--cache-dir"):
        Directory(tmp_path / "file", create=True)


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "lock", "opened"])
def test_what_is_in_a_files_place_is_named(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    place.mkdir()
    if name != "data.mdb":
        (tmp_path / "data.mdb").touch()
    for create in (False, True):
        with pytest.raises(StoreError) as error:
            Directory(tmp_path, create=create)
        assert str(error.value).startswith(f"{place}: is a directory, but the store needs a file there; move it away")
    place.rmdir()
    os.mkfifo(place)
    with pytest.raises(StoreError, match="is no plain file"):
        Directory(tmp_path, create=True)


def test_the_marker_tells_a_crash(tmp_path: Path) -> None:
    first = Directory(tmp_path, create=True)
    assert not first.was_left_open()
    first.release(clean=False)
    second = Directory(tmp_path, create=True)
    assert second.was_left_open()
    second.release(clean=True)
    third = Directory(tmp_path, create=True)
    assert not third.was_left_open()
    third.release(clean=True)


def test_only_the_newest_file_set_aside_is_kept(tmp_path: Path) -> None:
    directory = Directory(tmp_path, create=True)
    (tmp_path / "data.mdb.damaged-20200101-000000").touch()
    directory.data.write_text("new")
    directory.set_aside("a test")
    [kept] = tmp_path.glob("data.mdb.damaged-*")
    assert kept.read_text() == "new"
    assert not directory.data.exists()
    directory.release(clean=True)


def test_the_mode_of_somebodys_directory_is_left_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "notes.txt").touch()
    Directory(shared, create=True).release(clean=True)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
