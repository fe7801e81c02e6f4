"""Main of the process that makes a closed store's file small: `python -m homeprefixd.prefix.compactor DIR MIN_FREE`.

The content is copied beside the file and then takes its place, in one step: whatever happens, one whole file is there.
No copy is made that would leave less than MIN_FREE bytes of the disk free.
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
from ..machine import free_disk
from ..sizes import size_text
from .directory import DATA, PART, Directory, sync_names
from .warm_table import FILE_FORMAT, META, TABLES

_META_PAGES = 2


def compact(path: Path, min_free: int) -> tuple[int, int]:
    """Bytes on disk before and after. `min_free`: of the disk, in bytes. Raises StoreError."""
    directory = Directory(path, create=False)
    part = path / PART
    try:
        if directory.was_left_open(mark=False) and (problem := directory.problem()):
            raise StoreError(f"{directory.data} is damaged: {problem}; `serve` would set it aside and begin a new one")
        before = directory.data.stat().st_blocks * 512
        part.unlink(missing_ok=True)
        _copy(path, part, min_free)
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


def _copy(path: Path, part: Path, min_free: int) -> None:
    env = lmdb.open(str(path), readonly=True, lock=False, create=False, max_dbs=len(TABLES))
    try:
        with env.begin() as txn:
            meta = env.open_db(META, txn=txn, create=False)
            if txn.get(b"format", db=meta) != FILE_FORMAT:
                raise StoreError(f"{path / DATA} has another format; `serve` would begin a new one")
            need = _size(env, txn)
        free = free_disk(path)
        if free < need + min_free:
            raise StoreError(
                f"{path / DATA}: a copy of {size_text(need)} has no room beside it: {size_text(free)} of the disk are"
                f" free, and `cache.min_free` leaves {size_text(min_free)} of them to others"
            )
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            env.copyfd(descriptor, compact=True)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        env.close()


def _size(env: lmdb.Environment, txn: lmdb.Transaction) -> int:
    """Bytes that the copy will have."""
    pages = _META_PAGES
    of_main = env.stat()
    for name in (None, *TABLES):
        try:
            stat = of_main if name is None else txn.stat(env.open_db(name, txn=txn, create=False))
        except lmdb.NotFoundError:
            continue
        pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    return int(pages * of_main["psize"])


def main() -> int:
    try:
        before, after = compact(Path(sys.argv[1]), int(sys.argv[2]))
    except StoreError as error:
        print(error.message, file=sys.stderr)
        return StoreError.exit_code
    print(json.dumps({"before": before, "after": after}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
