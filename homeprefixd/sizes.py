"""Sizes as people read them."""

from __future__ import annotations


def size_text(count: float) -> str:
    """Bytes as `1.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
