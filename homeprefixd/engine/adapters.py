"""LoRA adapters of a loaded model: loaded once, applied to a context by each call that computes.

One that cannot be loaded harms nobody but who asks for it. llama.cpp frees them with the model. Which ones a request
means is in `lora.py`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from llama_cpp import llama_cpp as C  # noqa: N812

from ..errors import ModelError
from ..frames.worker import AdapterFile, AdapterInfo
from ..lora import Chosen
from .bindings import Model, check_gguf
from .context import Context
from .model_files import FileIdentity, file_identity

logger = logging.getLogger(__name__)


class Adapters:
    """In the order of the configuration. `infos` may be read by any thread; `use` is the engine's.

    Several at once are added up in an order of llama.cpp's own, so that there numbers may differ in rounding from one
    start to another.
    """

    def __init__(self) -> None:
        self.infos: list[AdapterInfo] = []
        self._pointers: list[Any] = []
        self._identities: list[FileIdentity | None] = []
        self._arrays: dict[Chosen, tuple[Any, Any]] = {}

    @classmethod
    def load(cls, model: Model, files: Sequence[AdapterFile]) -> Adapters:
        """Load all that can be. Before any context is made: its buffers are sized for them."""
        found = cls()
        for file in files:
            found._load(model, file)
        return found

    def _load(self, model: Model, file: AdapterFile) -> None:
        pointer, identity, size = None, None, 0
        problem = file.problem
        if not problem:
            try:
                identity = file_identity(Path(file.path))
                size = identity[2]
                pointer = _load_one(model, Path(file.path))
            except ModelError as error:
                problem = error.message
            except OSError as error:
                problem = f"{file.path} cannot be read: {error.strerror}."
        if problem:
            logger.error("the adapter %s of %s cannot be used: %s", file.id, model.path, problem)
        self._pointers.append(pointer)
        self._identities.append(identity)
        self.infos.append(AdapterInfo(file.id, file.path, file.scale, file.default, problem, size=size))

    def identity(self, index: int) -> FileIdentity | None:
        """Of its file when it was loaded; see `file_identity`."""
        return self._identities[index]

    def hashed(self, index: int, sha256: str) -> None:
        """Its content is known now."""
        self.infos[index] = msgspec.structs.replace(self.infos[index], sha256=sha256)

    def use(self, context: Context, chosen: Chosen) -> None:
        """Have `context` compute with these from now on. Costs about half a call where they were others before."""
        if chosen == context.lora:
            return
        arrays = self._arrays.get(chosen)
        if arrays is None:
            pointers = (C.llama_adapter_lora_p_ctypes * max(1, len(chosen)))(
                *(self._pointers[index] for index, _ in chosen)
            )
            scales = (ctypes.c_float * max(1, len(chosen)))(*(scale for _, scale in chosen))
            if len(self._arrays) >= _REMEMBERED:
                self._arrays.clear()
            arrays = self._arrays[chosen] = pointers, scales
        pointers, scales = arrays
        if C.llama_set_adapters_lora(context.pointer, pointers, len(chosen), scales) != 0:
            raise ModelError("llama.cpp does not take these adapters together.")
        context.lora = chosen


_REMEMBERED = 256  # sets of adapters


def _load_one(model: Model, path: Path) -> Any:
    """Raises ModelError with llama.cpp's reason."""
    check_gguf(path)
    model.log.clear()
    pointer = C.llama_adapter_lora_init(model.pointer, str(path).encode())
    if not pointer:
        reason = model.log.reason() or "llama.cpp gave no reason"
        raise ModelError(f"{path} cannot be loaded as an adapter: {reason}.", code="adapter_failed")
    if C.llama_adapter_get_alora_n_invocation_tokens(pointer):
        C.llama_adapter_lora_free(pointer)
        raise ModelError(f"{path} is an adapter that counts from certain tokens on (aLoRA), which is not supported.")
    return pointer
