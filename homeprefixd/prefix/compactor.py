"""Main of the process that makes a closed store's file small: `python -m homeprefixd.prefix.compactor DIR`.

The content is copied beside the file and then takes its place, in one step: whatever happens, one whole file is there.
Prints {"before": bytes, "after": bytes}. Exit status 6 with the reason as the last line of stderr: nothing was changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import lmdb

from ..errors import StoreError
from .directory import DATA, PART, Directory, sync_names
from .warm_table import FILE_FORMAT, META, TABLES


def compact(path: Path) -> tuple[int, int]:
    """Bytes on disk before and after. Raises StoreError."""
    directory = Directory(path, create=False)
    part = path / PART
    try:
        if directory.was_left_open(mark=False) and (problem := directory.problem()):
            raise StoreError(f"{directory.data} is damaged: {problem}; `serve` would set it aside and begin a new one")
        before = directory.data.stat().st_blocks * 512
        part.unlink(missing_ok=True)
        _copy(path, part)
        os.replace(part, directory.data)
        (path / "lock.mdb").unlink(missing_ok=True)
        sync_names(path)
        return before, directory.data.stat().st_blocks * 512
    except (OSError, lmdb.Error) as error:
        raise StoreError(f"{directory.data}: cannot be compacted: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        directory.release(clean=False)  # the mark stays as it was


def _copy(path: Path, part: Path) -> None:
    env = lmdb.open(str(path), readonly=True, lock=False, create=False, max_dbs=len(TABLES))
    try:
        with env.begin() as txn:
            meta = env.open_db(META, txn=txn, create=False)
            if txn.get(b"format", db=meta) != FILE_FORMAT:
                raise StoreError(f"{path / DATA} has another format; `serve` would begin a new one")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            env.copyfd(descriptor, compact=True)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        env.close()


def main() -> int:
    try:
        before, after = compact(Path(sys.argv[1]))
    except StoreError as error:
        print(error.message, file=sys.stderr)
        return StoreError.exit_code
    print(json.dumps({"before": before, "after": after}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
