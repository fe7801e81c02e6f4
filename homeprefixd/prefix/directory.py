"""The store's directory: whose it is, whether a store may live there, and what happened to the file before.

Everything around `data.mdb` but its content: filesystem, permissions, the owner's lock, the marker that tells a clean
stop from a crash, and setting a damaged file aside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from ..errors import StoreError

DATA = "data.mdb"
_LMDB_LOCK = "lock.mdb"
_OWNER = "lock"
_MARKER = "opened"
_DAMAGED = f"{DATA}.damaged-"
_OTHER = f"{DATA}.other-version-"
PART = f"{DATA}.part"
"""A copy that is being made of the file."""

_CHECK_SECONDS = 120.0

# in the marker
_CORRUPT = "corrupt: "
_CRASHED = "after a crash"
_FATAL = "Fatal Python error"  # as faulthandler writes it

_NETWORK = frozenset(
    (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "coda",
        "ceph",
        "9p",
        "virtiofs",
        "lustre",
        "beegfs",
        "gpfs",
    )
)
_NETWORK_FUSE = frozenset(
    (
        "sshfs",
        "rclone",
        "s3fs",
        "goofys",
        "glusterfs",
        "ceph",
        "curlftpfs",
        "davfs",
        "gcsfuse",
        "juicefs",
        "mfs",
        "gvfsd",
    )
)

log = logging.getLogger(__name__)


def filesystem_of(path: Path, mounts: str) -> str:
    """Type of the filesystem that holds `path` (resolved); `mounts` as in `/proc/self/mountinfo`; "" if unknown."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields, _separator, rest = line.partition(" - ")
        parts = fields.split(" ")
        if len(parts) < 5 or not rest:
            continue
        point = parts[4].encode().decode("unicode_escape")
        inside = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if inside and len(point) >= len(best):  # of two mounts at one point the later one is seen
            best, kind = point, rest.split(" ")[0]
    return kind


def is_network(kind: str) -> bool:
    """Whether a filesystem type is one where a memory-mapped database is unsafe."""
    return kind in _NETWORK or (kind.startswith("fuse.") and kind[5:] in _NETWORK_FUSE)


def sync_names(path: Path) -> None:
    """Put on disk which files a directory has. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Directory:
    """A directory that this process owns until `release`. Raises StoreError if it cannot be a store's.

    `create`: make it if it is missing; else a directory without a store in it is refused.
    `read_only`: nothing is to be written, so it may be where nothing can be.
    `owner`: the process that holds it as others are told, who may want to stop it; None: this one.
    `mounts`: the system's mount table, for tests.
    """

    def __init__(
        self,
        path: Path,
        *,
        create: bool,
        owner: int | None = None,
        mounts: str | None = None,
        read_only: bool = False,
    ) -> None:
        self.path = path
        self.data = path / DATA
        self._marker = path / _MARKER
        self._last_words = ""
        if not create and not os.path.exists(self.data):  # False also for a name that cannot be
            raise StoreError(f"{path}: there is no store here; give the directory that `serve` uses with --cache-dir")
        self._refuse_strange(path)
        self._lock: int | None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_network(path.resolve(), mounts)
            if self.data.exists() or not any(path.iterdir()):  # else it is somebody's, for other things too
                os.chmod(path, 0o700)
            self._lock = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if not read_only:
                raise StoreError(
                    f"{path}: the cache cannot be kept here: {error.strerror or error}; "
                    "choose another directory with --cache-dir, or make this one writable"
                ) from error
            self._lock = self._lock_to_read(error)
        if self._lock is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StoreError(
                f"{path}: in use by another homeprefixd (process {self._owner() or 'unknown'}); "
                "stop it, or choose another directory with --cache-dir"
            ) from error
        with contextlib.suppress(OSError):  # a full disk: only a message would be the poorer
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{owner or os.getpid()}\n".encode(), 0)

    def _lock_to_read(self, refusal: OSError) -> int | None:
        """The owner's lock where nothing can be written; None where there is none and nobody could make one.

        LMDB's own is not used then, so whoever has the file open must hold this one. `refusal`: why it cannot be
        written. Raises StoreError.
        """
        try:
            return os.open(self.path / _OWNER, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if refusal.errno == errno.EROFS:
                return None
            why = f"it cannot be locked ({refusal.strerror or refusal})"
        except OSError as error:
            why = error.strerror or str(error)
        raise StoreError(
            f"{self.path}: the store cannot be read: {why}; read it as the user whose daemon keeps it"
        ) from refusal

    @staticmethod
    def _refuse_strange(path: Path) -> None:
        """What opening would name wrongly, or wait for (a pipe)."""
        for place in (path / name for name in (DATA, _LMDB_LOCK, _OWNER, _MARKER)):
            if os.path.exists(place) and not os.path.isfile(place):
                what = "a directory" if os.path.isdir(place) else "no plain file"
                raise StoreError(
                    f"{place}: is {what}, but the store needs a file there; "
                    "move it away, or choose another directory with --cache-dir"
                )

    @staticmethod
    def _refuse_network(path: Path, mounts: str | None) -> None:
        if mounts is None:
            try:
                mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
            except OSError:
                return
        kind = filesystem_of(path, mounts)
        if is_network(kind):
            raise StoreError(
                f"{path}: is on a network filesystem ({kind}), where a memory-mapped store is not safe; "
                "choose a directory on a local disk with --cache-dir"
            )

    def _owner(self) -> str:
        try:
            return (self.path / _OWNER).read_text().strip()
        except OSError:
            return ""

    def was_left_open(self, *, mark: bool = True) -> bool:
        """Whether the last owner did not stop cleanly. `mark`: from now on this one is held to it, until `release`."""
        left = self._marker.exists()
        with contextlib.suppress(OSError):
            self._last_words = self._marker.read_text(errors="replace") if left else ""
        if mark:
            with contextlib.suppress(OSError):
                self._marker.touch(mode=0o600)
                self._marker.write_text("")
        return left

    def note_corruption(self, why: str) -> None:
        """LMDB has found the file damaged, in a place that the check may not look at."""
        self._note(f"{_CORRUPT}{why}")

    def crash_file(self) -> int | None:
        """Descriptor of a file for what a fatal signal leaves of this process (`faulthandler`); it stays open.

        SIGKILL leaves nothing: it says nothing against the file.
        """
        try:
            return os.open(self._marker, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None

    def reproach(self) -> str:
        """What the last owner left to say against the file, though the check finds nothing; "" for nothing.

        Damage that only a writer meets, in LMDB's list of free pages, is seen by no check: without this the store would
        die of it again and again. A crash may have other causes, so two in a row are needed.
        """
        for line in self._last_words.splitlines():
            if line.startswith(_CORRUPT):
                return line.removeprefix(_CORRUPT)
        if _FATAL not in self._last_words:
            return ""
        if _CRASHED in self._last_words:
            return "the store has crashed twice in a row while it was open"
        log.error("the store has crashed: %s", self._last_words.partition(_FATAL)[2].partition("\n")[0].strip(" :"))
        self._note(_CRASHED)
        return ""

    def _note(self, line: str) -> None:
        with contextlib.suppress(OSError), self._marker.open("a") as file:
            file.write(f"{line}\n")

    def problem(self) -> str:
        """What is wrong with the file, found by a throw-away process that reads all of its tables; "" if nothing.

        A damaged file can kill who reads it (SIGBUS), so it must not be this process.
        """
        if not self.data.exists():
            return ""
        command = [sys.executable, "-m", "homeprefixd.prefix.checker", str(self.path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"reading it took more than {_CHECK_SECONDS:.0f} s"
        except OSError as error:
            log.warning("the store was not stopped cleanly and cannot be checked: %s", error)
            return ""
        if done.returncode == 0:
            return ""
        words = done.stderr.strip().splitlines()
        if done.returncode < 0:
            return f"reading it ends with signal {-done.returncode}"
        return words[-1] if words else f"its check ended with status {done.returncode}"

    def set_aside(self, why: str, *, damaged: bool = True) -> None:
        """Move the file out of the way; one set aside before for the same reason goes, so that they do not pile up.

        `damaged`: it is; else it is sound, but nothing that this version reads.
        """
        what = "damaged" if damaged else "of another version"
        prefix = _DAMAGED if damaged else _OTHER
        aside = self.path / f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            for old in self.path.glob(f"{prefix}*"):
                old.unlink()
            self.data.rename(aside)
            (self.path / _LMDB_LOCK).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self.data}: {what} ({why}) and cannot be moved away: {error}; remove it") from error
        level = logging.ERROR if damaged else logging.WARNING
        log.log(level, "%s: %s (%s); set aside as %s, starting with an empty store", self.data, what, why, aside.name)

    def remove_leftovers(self) -> None:
        """A copy that was not finished, as its process was killed."""
        try:
            (self.path / PART).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: cannot be removed: %s", self.path / PART, error)

    def release(self, *, clean: bool) -> None:
        """Give the directory up. `clean`: the file was closed in order."""
        if clean:
            with contextlib.suppress(OSError):
                self._marker.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
