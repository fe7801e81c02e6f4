"""Prompts for models that fill gaps in a text: what stands before, what stands after, and other files first.

The order is llama-server's: files, then before the gap, after the gap, and the mark at which the model goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import RequestError
from .bindings import FillTokens, Model

_BETWEEN_FILES = "\n\n--- snippet ---\n\n"
_PROJECT, _FILE = "myproject\n", "filename\n"


def fill_prompt(model: Model, before: str, after: str, files: list[tuple[str, str]], room: int) -> list[int]:
    """Tokens, at most `room` of them for all that is given. Files lose their beginning first, then `before`, `after`
    its end. Raises RequestError for a model without tokens for it.
    """
    special = model.fill_tokens()
    if special is None:
        raise RequestError(
            "This model has no tokens for filling gaps: send what stands before the gap as a prompt, or use a model"
            " that was made for it.",
            code="no_infill",
        )

    def tokens_of(text: str) -> list[int]:
        return model.tokenize(text, add_bos=False, parse_special=False)

    head, tail = tokens_of(before), tokens_of(after)
    room = max(0, room)
    tail = tail[: max(room // 4, room - len(head))]
    head = head[max(0, len(head) - (room - len(tail))) :]
    context = _files(special, files, tokens_of)
    left = room - len(head) - len(tail)
    context = context[max(0, len(context) - left) :] if left > 0 else []
    bos = [model.bos] if model.add_bos else []
    return [*context, *bos, special.before, *head, special.after, *tail, special.middle]


def _files(special: FillTokens, files: list[tuple[str, str]], tokens_of: Callable[[str], list[int]]) -> list[int]:
    context: list[int] = []
    if not files:
        return context
    if special.project >= 0:
        context += [special.project, *tokens_of(_PROJECT)]
    for name, text in files:
        if special.file >= 0:
            context += [special.file, *tokens_of(f"{name}\n")]
        else:
            context += tokens_of(_BETWEEN_FILES)
        context += tokens_of(text)
    if special.file >= 0:
        context += [special.file, *tokens_of(_FILE)]
    return context
