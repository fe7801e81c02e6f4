"""At first sight of a model: have a throw-away process find out whether its state can be cut into blocks.

llama.cpp ends the process where a memory cannot do what it is asked for, or a file is not what it should be; so that is
tried where it harms nobody. The outcome is remembered by what the file says of itself (its first megabytes and its
size), not by its path. Loads nothing of llama.cpp; the process's own side is `probing.py`.

What a file says of itself is whole long before the file is: one that is being copied may have its full size from the
start. To read all of it would take a first start minutes. So each outcome is kept with the identity of the files that
it was found with, which costs nothing, and does not hold once they were written again. A good one also holds for
another file that says the same (a copy, or after a restart that numbers its disks anew), since it depends on what the
head says; a bad one may come of the rest, so that such a file is tried for itself. What was written during the trial is
not judged at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import time
from importlib.metadata import distribution
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from ..errors import ModelError
from ..frames.worker import AdapterFile, LoadModel
from ..kept_files import one_at_a_time, read_kept, write_kept
from ..last_loads import HEAD
from ..supervise import Exit, child_environment, module_command
from .model_files import FileIdentity, file_identity, model_files

MEMO = "probes.json"
ADAPTERS_MEMO = "adapters.json"
WHOLE = "--whole"
"""Argument of the process: the state is not to be cut into blocks."""

ADAPTERS = "--adapters"
"""Argument of the process: only the model's adapters are tried. It says what is wrong with each, as JSON."""

LOADED = "loaded"
"""What the process says first, on a line of its own; then its outcome as JSON."""

_OF_ITSELF = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})
"""What llama.cpp dies of. Other signals come from outside: the daemon ends, memory is out, somebody wants it so; SIGBUS
is a disk that cannot be read, or a file that was cut while it was mapped."""

_SECONDS = 900.0
_REMEMBERED = 200
_MOST = 1 << 20  # bytes of a file that can be ours
_WAYS = 2  # another number when outcomes may be others than before
_WORDS = 40  # last lines

Files = tuple[FileIdentity, ...]
"""What an outcome was found with: all parts of the model, and the adapter that was tried."""

logger = logging.getLogger(__name__)

Mode = Literal["blocks", "blocks with edges", "whole sequence", "off"]


class Outcome(NamedTuple):
    """`mode` as in `ModelInfo.cache_mode`; `reason` says why it is off, or not in blocks."""

    mode: Mode
    reason: str = ""


class _KeptOutcome(NamedTuple):
    """As it is in the memo; without files if it is older than that they are kept."""

    mode: Mode
    reason: str = ""
    files: Files = ()

    @property
    def good(self) -> bool:
        return self.mode != "off"


class _KeptProblem(NamedTuple):
    """Of an adapter; "" for none."""

    problem: str
    files: Files = ()

    @property
    def good(self) -> bool:
        return not self.problem


Kept = TypeVar("Kept", _KeptOutcome, _KeptProblem)


def _holds(kept: _KeptOutcome | _KeptProblem, files: Files) -> bool:
    """Whether what was found then is true of these files; see above."""
    written = any(old[:2] == new[:2] and old != new for old, new in zip(kept.files, files, strict=False))
    return kept.files == files or (kept.good and not written)


def _identities(*paths: Path) -> Files:
    """Raises OSError."""
    return tuple(file_identity(path) for path in paths)


def _written_since(files: Files, *paths: Path) -> bool:
    try:
        return _identities(*paths) != files
    except OSError:
        return True


def probe(load: LoadModel, directory: Path) -> Outcome | None:
    """What is known of a model, after trying it if it was never seen. `directory`: where that is remembered.

    `load` as resolved: layers, flash attention, and the devices that get layers. None: it could not be found out now.
    Raises ModelError if llama.cpp dies of loading it.
    """
    memo = directory / MEMO
    parts = model_files(Path(load.path))
    try:
        files, key = _identities(*parts), _key(load)
    except OSError:
        return None  # loading it says more
    known = _remembered(memo, _KeptOutcome).get(key)
    if known is not None and _holds(known, files):
        return Outcome(known.mode, known.reason)
    began = time.monotonic()
    outcome, for_good = _run(load)
    if outcome is None:
        return None
    if _written_since(files, *parts):
        logger.info("%s was written while it was probed, so nothing is known of it: %s", load.path, outcome.mode)
        return None
    logger.info("%s was probed in %.1f s: %s", load.path, time.monotonic() - began, ": ".join(filter(None, outcome)))
    if for_good:
        _remember(memo, {key: _KeptOutcome(*outcome, files)})
    return outcome


def probe_adapters(load: LoadModel, directory: Path) -> list[AdapterFile]:
    """The model's adapters, those that llama.cpp dies of with that as their `problem`. Tried if never seen."""
    if not load.adapters:
        return []
    memo = directory / ADAPTERS_MEMO
    parts = model_files(Path(load.path))
    try:
        files, model = _identities(*parts), _key(load)
    except OSError:
        return load.adapters  # loading the model says more
    kept = _remembered(memo, _KeptProblem)
    keys = [_adapter_key(model, files, file) for file in load.adapters]
    known = {key: kept[key].problem for key, own in keys if key in kept and _holds(kept[key], own)}
    untried = [
        (key, own, file)
        for (key, own), file in zip(keys, load.adapters, strict=True)
        if key and key not in known and not file.problem
    ]
    while untried:
        found = _run_adapters(load, [file for _, _, file in untried])
        if not found:
            break  # it cannot be found out now
        tried = list(zip(untried, found, strict=False))
        known |= {key: problem for (key, _, _), problem in tried}
        new = {
            key: _KeptProblem(problem, own)
            for (key, own, file), problem in tried
            if not _written_since(own, *parts, Path(file.path))
        }
        if new:
            _remember(memo, new)
        untried = untried[len(found) :]
    return [
        msgspec.structs.replace(file, problem=file.problem or known.get(key, ""))
        for (key, _), file in zip(keys, load.adapters, strict=True)
    ]


def _adapter_key(model: str, parts: Files, file: AdapterFile) -> tuple[str, Files]:
    """And what it is tried with. "" if it cannot be read."""
    try:
        with open(file.path, "rb") as opened:
            own, head = file_identity(opened.fileno()), opened.read(HEAD)
    except OSError:
        return "", ()
    return f"{hashlib.sha256(head).hexdigest()} {own[2]} {model}", (*parts, own)


def _run_adapters(load: LoadModel, files: list[AdapterFile]) -> list[str]:
    """What is wrong with each, "" for nothing, up to the first that llama.cpp dies of."""
    done = _process(msgspec.structs.replace(load, adapters=files), ADAPTERS)
    if done is None or LOADED not in (lines := done.stdout.decode("utf-8", "replace").splitlines()):
        return []
    found = [msgspec.json.decode(line, type=str) for line in lines[1:]]
    if _died(done) and len(found) < len(files):
        words = tuple(done.stderr.decode("utf-8", "replace").splitlines()[-_WORDS:])
        found.append(f"llama.cpp dies of it ({Exit(done.returncode, words)}).")
    return found


def _key(load: LoadModel) -> str:
    digest = hashlib.sha256()
    with open(load.path, "rb") as file:
        digest.update(file.read(HEAD))
        size = os.fstat(file.fileno()).st_size
    layers = min(1, load.gpu_layers)  # none, some or all: how many fit may be others at each start
    where = f"{_types(load)} {load.flash_attention} {layers} {load.device or '-'}"
    return f"{digest.hexdigest()} {size} {where} {_library()} {_WAYS}"


def _library() -> str:
    """Of llama.cpp: another build of the same version has other kernels. By its files as they lie there."""
    found = distribution("llama-cpp-python")
    digest = hashlib.sha256(found.version.encode())
    for file in sorted(found.files or [], key=str):
        if ".so" in file.name:
            with contextlib.suppress(OSError):
                status = os.stat(str(found.locate_file(file)))
                digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _types(load: LoadModel) -> str:
    """As it was before there were two, where both are the same."""
    return load.kv_type if load.kv_type_v in ("", load.kv_type) else f"{load.kv_type}/{load.kv_type_v}"


def _run(load: LoadModel, whole: bool = False) -> tuple[Outcome | None, bool]:
    """And whether it would be the same again. `whole`: it died of the state cut into blocks."""
    done = _process(load, *([WHOLE] if whole else []))
    if done is None:
        return None, False
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if done.returncode == 0 and len(lines) == 2:
        return msgspec.json.decode(lines[1], type=Outcome), True
    words = tuple(done.stderr.decode("utf-8", "replace").splitlines()[-_WORDS:])
    if not _died(done):  # refused, or ended from outside: loading it says more
        logger.info("%s was not probed: %s", load.path, Exit(done.returncode, words))
        return None, done.returncode >= 0
    if LOADED not in lines:
        raise ModelError(
            f"{load.path} cannot be loaded: llama.cpp dies of it ({Exit(done.returncode, words)}). Download it again,"
            " or name another file.",
            code="model_load_failed",
        )
    logger.error("the probe of %s died: %s", load.path, " | ".join(words))
    reason = f"llama.cpp dies of restoring its state ({Exit(done.returncode, words)})"
    if whole:
        return Outcome("off", reason), True
    found, for_good = _run(load, whole=True)
    return Outcome("whole sequence" if found and found.mode == "whole sequence" else "off", reason), for_good


def _died(done: subprocess.CompletedProcess[bytes]) -> bool:
    """Whether it ended of what it did itself."""
    return -done.returncode in _OF_ITSELF


def _process(load: LoadModel, *arguments: str) -> subprocess.CompletedProcess[bytes] | None:
    """A probe that has come to its end; None if it did not."""
    command = [*module_command("homeprefixd.engine.probing"), *arguments]
    try:
        return subprocess.run(
            command,
            input=msgspec.msgpack.encode(load),
            capture_output=True,
            timeout=_SECONDS,
            env=child_environment(os.environ),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s could not be probed: %s", load.path, error)
        return None


def _remembered(memo: Path, kind: type[Kept]) -> dict[str, Kept]:
    try:
        found = msgspec.json.decode(read_kept(memo, _MOST), type=dict[str, msgspec.Raw])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        logger.info("%s cannot be read, models are probed again: %s", memo, error)
        return {}
    known: dict[str, Kept] = {}
    for key, entry in found.items():
        try:
            known[key] = msgspec.json.decode(entry, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            logger.info("an entry of %s is not what was kept here: %s", memo, error)
    return known


def _remember(memo: Path, new: dict[str, Kept]) -> None:
    try:
        with one_at_a_time(memo.parent):
            known = {**_remembered(memo, type(next(iter(new.values())))), **new}
            newest = dict(list(known.items())[-_REMEMBERED:])
            write_kept(memo, json.dumps(newest, indent=1).encode())
    except OSError as error:
        logger.info("%s cannot be written, the model is probed again next time: %s", memo, error)
