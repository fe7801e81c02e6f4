"""Texts and token ids that a client mixes, as llama-server takes them: what is allowed."""

from __future__ import annotations

from typing import Any

from ..errors import RequestError
from .openai import MAX_TOKEN

MAX_TEXT = 4 << 20
"""Characters that are tokenised at once: about a second."""

MAX_TOKENS = 1 << 20
MAX_PARTS = 10_000
"""Pieces of a mixed `content`, each of which is tokenised by itself."""


def check_ids(name: str, ids: list[int], n_vocab: int | None) -> None:
    """Raises RequestError. `n_vocab`: None where it is not known."""
    if len(ids) > MAX_TOKENS:
        raise RequestError(f"`{name}` must have at most {MAX_TOKENS} tokens.", param=name, code="out_of_range")
    limit = MAX_TOKEN if n_vocab is None else n_vocab
    if ids and not 0 <= min(ids) <= max(ids) < limit:
        raise RequestError(
            f"`{name}` contains a token id that is not from 0 to {limit - 1}.", param=name, code="bad_token"
        )


def checked_content(content: str | list[str | int], n_vocab: int | None, name: str = "content") -> list[str | int]:
    """As a list of texts and token ids. Raises RequestError."""
    parts: list[str | int] = [content] if isinstance(content, str) else content
    texts = [part for part in parts if isinstance(part, str)]
    check_ids(name, [part for part in parts if isinstance(part, int)], n_vocab)
    if sum(map(len, texts)) > MAX_TEXT or len(texts) > MAX_PARTS:
        raise RequestError(
            f"`{name}` must have at most {MAX_TEXT} characters in at most {MAX_PARTS} texts: send it in pieces.",
            param=name,
            code="out_of_range",
        )
    return parts


def object_text(name: str, given: dict[str, Any]) -> str:
    """The text of an object with `prompt_string`, or with `content` of parts. Raises RequestError."""
    if given.get("multimodal_data"):
        raise RequestError("`multimodal_data` is not supported here: send text.", param=name, code="unsupported_value")
    parts = given.get("content")
    if isinstance(parts, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    else:
        texts = [given.get("prompt_string")]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"`{name}` must hold texts, token ids, lists of these, or objects with `prompt_string` or with `content` of"
            " parts of type 'text'.",
            param=name,
            code="wrong_type",
        )
    return "".join(text for text in texts if text is not None)
