"""LoRA adapters of a configured model: their files, looked at before they are loaded, and their names in the API."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from stat import S_ISREG

from ..config import AdapterConfig, ModelConfig
from ..errors import ModelError
from ..frames.worker import AdapterFile
from ..gguf_header import read_metadata

_WANTED = {"general.type": str, "adapter.type": str, "general.architecture": str, "adapter.lora.alpha": float}
"""What llama.cpp reads of an adapter, and what it must be: it ends the process where it is of another type."""


def adapter_files(settings: ModelConfig) -> list[AdapterFile]:
    """What the worker is told of them. Reads the beginning of each file."""
    return [
        AdapterFile(one.id, one.path, one.scale, one.default, problem_of(Path(one.path))) for one in settings.adapters
    ]


def problem_of(path: Path) -> str:
    """Why this cannot be an adapter; "" if by its metadata it is one. Waits for the disk."""
    try:
        if path.is_dir():
            return f"{path} is a directory: an adapter is a GGUF file."
        found = read_metadata(path, lambda name: name in _WANTED)
    except ModelError as error:
        return error.message
    for name, kind in _WANTED.items():
        if name in found and not isinstance(found[name], kind):
            return f"{path} is damaged: its {name} is {str(found[name])[:100]!r}."
    if found.get("general.type") != "adapter" or found.get("adapter.type") != "lora":
        return f"{path} is no LoRA adapter (its general.type is {str(found.get('general.type', 'absent'))[:100]})."
    return ""


def adapters_bytes(settings: ModelConfig) -> int:
    """Of the files that are there. Each may go at any time."""
    found = 0
    for adapter in settings.adapters:
        with contextlib.suppress(OSError, ValueError):
            stat = os.stat(adapter.path)
            found += stat.st_size if S_ISREG(stat.st_mode) else 0
    return found


def name_of(alias: str, adapter: AdapterConfig) -> str:
    """What the model `alias` is called with this adapter."""
    return adapter.alias or f"{alias}:{adapter.id}"
