"""Main of the throw-away process that reads a suspect store: `python -m homeprefixd.prefix.checker DIR`.

Exit status 0: every table can be read and they agree. 1: they cannot; the reason is the last line of stderr. A signal
(SIGBUS, SIGSEGV) says it too. Contents of payloads are not read: their checksums guard them when they are used.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from .directory import DATA
from .disk_file import CountsError, plausible_use
from .warm_table import KEYS, NODES, ORDER, PAYLOADS, TABLES, decode_record


def check(directory: Path) -> str:
    """What is wrong; "" if nothing."""
    size = os.stat(directory / DATA).st_size
    if size == 0:
        return ""
    try:
        env = lmdb.open(str(directory), readonly=True, lock=False, create=False, max_dbs=len(TABLES))
        info = env.info()
        page = env.stat()["psize"]
        if size < (info["last_pgno"] + 1) * page:
            return f"it has {size} bytes, {(info['last_pgno'] + 1) * page} were written"
        tables = {}
        with env.begin() as txn:
            names = {bytes(key) for key, _value in txn.cursor()}
        for name in TABLES:
            if name in names:
                tables[name] = env.open_db(name, create=False)
        counts = {}
        with env.begin() as txn:
            stats = {name: txn.stat(table) for name, table in tables.items()}
            plausible_use(stats, env.stat(), info["last_pgno"] + 1, _stored(txn, tables))
            for name, table in tables.items():
                cursor = txn.cursor(table)
                rows = cursor.iternext(keys=True, values=False) if name == PAYLOADS else cursor.iternext()
                counts[name] = sum(1 for _row in rows)
                if counts[name] != txn.stat(table)["entries"]:
                    return f"table {name.decode()} has {counts[name]} rows, not as many as it says"
        env.close()
    except (lmdb.Error, CountsError) as error:
        return str(error)
    if counts.get(NODES, 0) != counts.get(KEYS, 0) or counts.get(ORDER, 0) > counts.get(NODES, 0):
        return f"its tables differ: {counts}"
    return ""


def _stored(txn: Any, tables: Mapping[bytes, Any]) -> int:
    """Bytes of all payloads, by the nodes' records."""
    total = 0
    for _place, value in txn.cursor(tables[NODES]) if NODES in tables else ():
        with contextlib.suppress(msgspec.DecodeError):
            total += decode_record(value).stored
    return total


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    if found:
        print(found, file=sys.stderr)
    sys.exit(bool(found))
