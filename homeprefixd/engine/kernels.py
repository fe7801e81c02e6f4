"""Which special CPU kernels (AMX, repacked weights) llama.cpp may use in this process.

They change numbers, so their names are part of the namespace; and one of them can crash:

GCC before 14 compiles `_tile_loadconfig` as an instruction that reads 8 bytes of the 64-byte tile configuration
(seen in 12.2's amxtileintrin.h; in the assembler the other stores are gone, as dead ones). llama.cpp built with it
loads rubbish, and dies of a general protection fault in the first prefill of a quantised model on a CPU with AMX:
Debian 12's compiler on any recent Xeon. llama.cpp asks Linux once per process for the right to use AMX, and does
without where it is refused. Linux refuses as long as a thread has an alternate signal stack that is too small for
AMX's registers. So we ask first, in such a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_cpp import llama_cpp as C  # noqa: N812

_FIRST_GOOD_GCC = 14
_SIGNAL_STACKS = (4096, 6144, 8192)  # bytes; AMX needs about 11,000, and how few are allowed depends on the CPU
_SS_DISABLE = 2
_GCC = re.compile(rb"GCC: \([^)]*\) (\d+)\.")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """What was resolved. `names`: buffer types with kernels of their own, e.g. ("CPU_REPACK",)."""

    names: tuple[str, ...]
    allowed: bool
    """False: models must be loaded with `use_extra_bufts` off."""


class _StackT(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


_info: list[str] = []
_info_lock = threading.Lock()


def system_info() -> str:
    """What llama.cpp's kernels use of the processor, in its words; part of what KV state depends on.

    Asked for once in a process: llama.cpp builds it in one string for all threads, so that two who ask at the same
    moment can get it twice over, and with it a namespace in which nothing is ever found.
    """
    with _info_lock:
        if not _info:
            _info.append(C.llama_print_system_info().decode().strip())
        return _info[0]


def choose_kernels() -> Kernels:
    """Resolve the kernels of this process; keeps AMX out where the compiler broke it. Call before loading a model."""
    broken = amx_is_broken(_cpu_library())
    names = _without_amx() if broken else _extra_buffer_types()
    if broken and "AMX" in names:  # asked for before we could refuse
        logger.warning("AMX is broken in this build of llama.cpp, so special CPU kernels are off. See `kernels.py`.")
        return Kernels((), False)
    return Kernels(names, True)


def amx_is_broken(library: Path | None) -> bool:
    """True if `library` (libggml-cpu) has AMX kernels and was compiled by a GCC that breaks them."""
    if library is None or "AMX_INT8 = 1" not in system_info():
        return False
    try:
        versions = [int(match) for match in _GCC.findall(library.read_bytes())]
    except OSError:
        return False
    return bool(versions) and min(versions) < _FIRST_GOOD_GCC


def _cpu_library() -> Path | None:
    """The file of libggml-cpu that is mapped here."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libggml-cpu" in path:
            return Path(path)
    return None


def _without_amx() -> tuple[str, ...]:
    result: list[tuple[str, ...]] = []

    def ask() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for size in _SIGNAL_STACKS:
            stack = ctypes.create_string_buffer(size)
            if libc.sigaltstack(ctypes.byref(_StackT(ctypes.addressof(stack), 0, size)), None) == 0:
                break
        with _silenced_stderr():
            result.append(_extra_buffer_types())
        libc.sigaltstack(ctypes.byref(_StackT(None, _SS_DISABLE, 0)), None)

    thread = threading.Thread(target=ask, name="kernels")
    thread.start()
    thread.join()
    return result[0]


@contextlib.contextmanager
def _silenced_stderr() -> Iterator[None]:
    """ggml writes to the descriptor itself that it may not use AMX, which is what was wanted."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _extra_buffer_types() -> tuple[str, ...]:
    """Names of the CPU's extra buffer types. The first call in a process decides about AMX."""
    lib = C._lib  # the handle also finds what libllama depends on
    try:
        cpu_reg, address = lib.ggml_backend_cpu_reg, lib.ggml_backend_reg_get_proc_address
        device, name = lib.ggml_backend_reg_dev_get, lib.ggml_backend_buft_name
    except AttributeError:  # backends that are loaded later (GGML_BACKEND_DL): not decided here
        return ()
    cpu_reg.restype = address.restype = device.restype = ctypes.c_void_p
    address.argtypes, device.argtypes = [ctypes.c_void_p, ctypes.c_char_p], [ctypes.c_void_p, ctypes.c_size_t]
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    registry = cpu_reg()
    function = address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not function:
        return ()
    types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(function)(device(registry, 0))
    names: list[str] = []
    while types and types[len(names)]:
        names.append(name(types[len(names)]).decode())
    return tuple(names)
