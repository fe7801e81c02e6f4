"""Which devices llama.cpp can compute on beside the CPU, and how many of a model's layers fit them.

A build for the CPU alone has none. Nothing here knows of requests or of frames.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as C  # noqa: N812

from ..child import become_child
from ..config import DEVICE_WEIGHTS
from ..errors import ModelError
from .model_files import model_files

AUTO = -2
"""`gpu_layers`: as many as fit (`config.GPU_LAYERS_AUTO`)."""

_CPU, _INTEGRATED, _ACCELERATOR = 0, 2, 3  # ggml's types of devices; the first and last hold no layers

FOR_CELLS = 0.7
"""Of what is free on the devices once the weights are there; the rest is for compute buffers."""


@dataclass(frozen=True)
class Device:
    """A device that can hold layers. Sizes in bytes."""

    name: str  # as ggml has it: CUDA0, Vulkan0, Metal
    description: str
    free: int
    total: int
    pointer: int
    own: bool = True  # the memory is its own, and no RAM


def list_devices() -> list[Device]:
    """All of this build and machine, as they are now."""
    lib = _library()
    found: list[Device] = []
    for index in range(lib.ggml_backend_dev_count()):
        pointer = lib.ggml_backend_dev_get(index)
        kind = lib.ggml_backend_dev_type(pointer)
        if kind in (_CPU, _ACCELERATOR):
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        lib.ggml_backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
        name, text = (f(pointer) or b"" for f in (lib.ggml_backend_dev_name, lib.ggml_backend_dev_description))
        described = name.decode(), text.decode("utf-8", "replace")
        found.append(Device(*described, free.value, total.value, pointer, own=kind != _INTEGRATED))
    return found


def taken(before: Sequence[Device], now: Sequence[Device]) -> dict[str, int]:
    """Bytes of these devices' own memory that were free `before` and are not `now`, by name."""
    free = {device.name: device.free for device in now if device.own}
    return {device.name: max(0, device.free - free[device.name]) for device in before if device.name in free}


def main() -> None:
    """Say as JSON how much of each device's own memory is free, in bytes."""
    become_child("devices", "error")
    print(json.dumps({device.name: device.free for device in list_devices() if device.own}))


def choose_devices(names: str, there: Sequence[Device]) -> list[Device]:
    """Those that `model.device` names, with commas between; all for "". Raises ModelError for an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        return list(there)
    known = {device.name.lower(): device for device in there}
    for name in wanted:
        if name.lower() not in known:
            listed = (
                ", ".join(device.name for device in there) or "none: this llama-cpp-python computes on the CPU only"
            )
            raise ModelError(f"`model.device` names {name}, which is not there; there is {listed}.")
    return [known[name.lower()] for name in wanted]


def layers_that_fit(size: int, layers: int, free: int) -> int:
    """How many of `layers` (the output counts as one more) of `size` bytes in all fit into `free` bytes; -1: all."""
    room = int(free * DEVICE_WEIGHTS)
    if size <= room:
        return -1
    return int(room // (size / (layers + 1))) if layers > 0 and size > 0 else 0


def resolve_layers(wanted: int, path: Path, devices: Sequence[Device]) -> int:
    """`gpu_layers` as llama.cpp takes it: AUTO becomes a number; 0 where there is no device. Raises ModelError."""
    if not devices:
        return 0
    if wanted != AUTO:
        return wanted
    size = sum(os.path.getsize(part) for part in model_files(path))
    return layers_that_fit(size, _layer_count(path), sum(device.free for device in devices))


def device_list(devices: Sequence[Device]) -> Any:
    """For llama.cpp's parameters: pointers with a null at the end."""
    return (ctypes.c_void_p * (len(devices) + 1))(*(device.pointer for device in devices), None)


def _layer_count(path: Path) -> int:
    """Of the file's metadata; its tensors are not read. 0 if it cannot be loaded: loading it tells why."""
    params = C.llama_model_default_params()
    params.vocab_only = True
    pointer = C.llama_model_load_from_file(str(path).encode(), params)
    if not pointer:
        return 0
    try:
        return int(_metadata(pointer, f"{_metadata(pointer, 'general.architecture')}.block_count") or 0)
    finally:
        C.llama_model_free(pointer)


def _metadata(model: Any, key: str) -> str:
    buffer = ctypes.create_string_buffer(256)
    size = C.llama_model_meta_val_str(model, key.encode(), buffer, 256)  # type: ignore[arg-type, unused-ignore]
    return buffer.value.decode("utf-8", "replace") if size > 0 else ""


def _library() -> Any:
    lib = C._lib  # finds what libllama depends on, too
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_dev_count": (ctypes.c_size_t, []),
        "ggml_backend_dev_get": (ctypes.c_void_p, [ctypes.c_size_t]),
        "ggml_backend_dev_type": (ctypes.c_int, [ctypes.c_void_p]),
        "ggml_backend_dev_name": (ctypes.c_char_p, [ctypes.c_void_p]),
        "ggml_backend_dev_description": (ctypes.c_char_p, [ctypes.c_void_p]),
        "ggml_backend_dev_memory": (
            None,
            [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


if __name__ == "__main__":
    main()
