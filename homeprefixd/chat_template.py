"""The chat template that a model is served with: its file's own, or what `model.chat_template` gives."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ModelError


def template_text(given: str, own: str) -> str:
    """Its text. `given`: the setting, a text or a file's path; "": the model's `own`. Raises ModelError."""
    if not given:
        return own
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(os.path.expanduser(given)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"`model.chat_template` is {given}, which cannot be read ({error}): it must be a template's text or file."
        ) from error
