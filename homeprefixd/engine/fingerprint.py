"""What makes KV state compatible: the description of a namespace.

In it is everything that changes the bytes of KV state, as resolved, and nothing else: no path, alias, threads, batch
size, template or context length. `prefix.blocks.namespace_of` makes the key of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import llama_cpp as C  # noqa: N812

from ..frames.worker import ControlVector
from ..prefix.blocks import ADAPTERS, CONTROL_VECTORS, EDGES, FORMAT_VERSION, Edges
from .bindings import Model
from .capacity import original_context
from .context import Context
from .kernels import system_info

_PIECE = 8 << 20


def describe(
    model: Model,
    context: Context,
    *,
    sha256: str,
    libraries: dict[str, str],
    gpu_layers: int,
    salt: str,
    edges: Edges | None = None,
    adapters: Mapping[str, Any] | None = None,
    control_vectors: Sequence[ControlVector] = (),
) -> dict[str, Any]:
    """The description. `sha256`: of the model's content; `libraries`: from `library_hashes`.

    `edges`: what states need to be resumed, where they have edges; `adapters`: from `lora.described`;
    `control_vectors`: as they are applied.
    """
    original = original_context(model)
    return {
        "format": FORMAT_VERSION,
        "model_sha256": sha256,
        "arch": model.arch,
        "type_k": context.settings.kv_type,
        "type_v": context.settings.type_v,
        "flash_attention": context.flash_attention,
        "swa": "window" if model.n_swa else "none",
        "rope": {
            "scaling": model.meta("{arch}.rope.scaling.type") or "none",
            "freq_base": model.meta("{arch}.rope.freq_base") or "",
            "scale": model.meta("{arch}.rope.scaling.factor") or "",
            "yarn_orig_ctx": model.meta("{arch}.rope.scaling.original_context_length") or "",
            "yarn_ext_factor": model.meta("{arch}.rope.scaling.yarn_ext_factor") or "",
            "yarn_attn_factor": model.meta("{arch}.rope.scaling.attn_factor") or "",
            "yarn_beta_fast": model.meta("{arch}.rope.scaling.yarn_beta_fast") or "",
            "yarn_beta_slow": model.meta("{arch}.rope.scaling.yarn_beta_slow") or "",
            "factors": ("long" if context.n_ctx > original else "short") if original else "",
        },
        "llama_cpp": version("llama-cpp-python"),
        "libraries": libraries,
        "cpu": system_info(),
        "kernels": list(model.kernels.names) if model.kernels.allowed else [],
        "gpu_layers": gpu_layers if C.llama_supports_gpu_offload() else 0,
        "salt": salt,
        **(adapters or {ADAPTERS: []}),
        # Not in it without any: what was stored before there were such is still found.
        **({CONTROL_VECTORS: [_of_vector(one) for one in control_vectors]} if control_vectors else {}),
        **({} if edges is None else {EDGES: edges._asdict()}),
    }


def _of_vector(one: ControlVector) -> dict[str, Any]:
    return {"sha256": one.sha256, "scale": one.scale, "first_layer": one.first, "last_layer": one.last}


def library_hashes() -> dict[str, str]:
    """First 16 hex digits of the SHA-256 of each library that computes: libllama and libggml*."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    found = sorted(p for pattern in ("libllama.so", "libggml*.so") for p in folder.glob(pattern))
    return {path.name: _digest(path).hexdigest()[:16] for path in found}


def hash_file(path: Path, interrupt: Callable[[], str | None]) -> str:
    """SHA-256 in hex. `interrupt` is asked between pieces: another source's answer ends the work."""
    known = interrupt()
    if known is not None:
        return known
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            known = interrupt()
            if known is not None:
                return known
    return digest.hexdigest()


def combine(hashes: list[str]) -> str:
    """One hash for all parts of a model; that of a single file is its own."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _digest(path: Path) -> Any:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")
