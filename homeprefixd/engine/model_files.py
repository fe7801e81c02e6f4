"""Which files a model is made of."""

from __future__ import annotations

import re
from pathlib import Path

_SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


def model_files(path: Path) -> list[Path]:
    """The file, or all parts of a split one (`name-00001-of-00003.gguf`), in order."""
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    return [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]
