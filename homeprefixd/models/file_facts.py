"""What a model is, by its file alone: for those who list models, which loads none of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..chat_template import template_text
from ..config import ModelConfig
from ..errors import ModelError
from ..gguf_header import CHAT_TEMPLATE, Value, read_more_details
from .catalog import ModelSpec, model_parts
from .loading import guess_ctx

_VOCABULARY = "tokenizer.ggml.tokens"
_FILE_TYPE = "general.file_type"
_CAUSAL = "attention.causal"

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""llama.cpp's number of how a file is quantised -> its name."""


@dataclass(frozen=True)
class FileFacts:
    """As `ModelInfo` has them, and more. What the file does not say is "" or 0."""

    arch: str
    description: str  # how it is quantised
    n_params: int
    n_vocab: int
    n_embd: int
    n_ctx: int  # what one request may use, as far as it can be told before it is loaded
    ctx_is_set: bool  # by `model.ctx`, so that is what it will be
    template: str  # that it is served with; "": it has none, or one that cannot be read
    only_embeds: bool  # it generates no text


class FactsReader:
    """Remembers what it read of each file until that changes: its vocabulary alone takes a tenth of a second."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int, int], dict[str, Value], int]] = {}

    def read(self, spec: ModelSpec, memory: int) -> FileFacts:
        """`memory`: bytes that the pool of its cells may take; 0: not known. Waits for the disk; any thread may ask.

        Raises ModelError if the file is none that can be loaded.
        """
        if spec.problem:
            raise ModelError(spec.problem, code="model_load_failed")
        parts = [self._head(part) for part in model_parts(spec.path)]
        details = parts[0][0]
        arch = _text(details, "general.architecture")
        return FileFacts(
            arch=arch,
            description=FILE_TYPES.get(_number(details, _FILE_TYPE, -1), ""),
            n_params=sum(count for _, count in parts),
            n_vocab=_number(details, _VOCABULARY),
            n_embd=_number(details, "embedding_length"),
            n_ctx=guess_ctx(details, spec.settings, memory),
            ctx_is_set=bool(spec.settings.ctx),
            template=_template(spec.settings, details),
            only_embeds=details.get(_CAUSAL) is False or "bert" in arch,  # as `engine.embedding` has it
        )

    def _head(self, path: Path) -> tuple[dict[str, Value], int]:
        """Metadata without the architecture in their names, and how many parameters lie in this file."""
        try:
            stat = os.stat(path)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.", code="model_load_failed") from error
        identity = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
        known = self._known.get(path)
        if known is None or known[0] != identity:
            more = (_FILE_TYPE, _CAUSAL, _VOCABULARY, CHAT_TEMPLATE)
            known = self._known[path] = (identity, *read_more_details(path, more))
        return known[1], known[2]


def _template(settings: ModelConfig, details: Mapping[str, Value]) -> str:
    try:
        return template_text(settings.chat_template, _text(details, CHAT_TEMPLATE))
    except ModelError:  # it is told when the model is loaded
        return ""


def _text(details: Mapping[str, Value], name: str) -> str:
    value = details.get(name)
    return value if isinstance(value, str) else ""


def _number(details: Mapping[str, Value], name: str, default: int = 0) -> int:
    value = details.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default
