"""LoRA adapters of a request: which ones it means, and how they stand in a namespace. Pure; any process may ask."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from .config_adapters import MAX_SCALE
from .errors import RequestError, UnavailableError
from .frames.worker import AdapterInfo, LoraChoice
from .prefix.blocks import ADAPTER_NAMES, ADAPTERS

Chosen = tuple[tuple[int, float], ...]
"""Adapters of a request: places in the model's list in ascending order, and scales, none of them 0."""


class Space(NamedTuple):
    """What of a request decides in which namespace its blocks are: its salt, and its adapters."""

    salt: str = ""
    lora: Chosen = ()


def choose(adapters: Sequence[AdapterInfo], asked: Sequence[LoraChoice] | None, *, damaged: bool = False) -> Chosen:
    """What a request means; None: the default ones. Raises RequestError, UnavailableError for one that is damaged.

    `damaged`: take it all the same.
    """
    chosen: dict[int, float] = {}
    if asked is None:
        asked = [LoraChoice(index) for index, adapter in enumerate(adapters) if adapter.default]
    for one in asked:
        index = _find(adapters, one.id)
        adapter = adapters[index]
        if index in chosen:
            raise RequestError(f"`lora` names {adapter.id} twice.", param="lora", code="conflict")
        scale = adapter.scale if one.scale is None else one.scale
        if not math.isfinite(scale) or abs(scale) > MAX_SCALE:
            raise RequestError(
                f"`lora`: the scale of {adapter.id} must be from {-MAX_SCALE:g} to {MAX_SCALE:g}.",
                param="lora",
                code="out_of_range",
            )
        if adapter.problem and not damaged:
            raise UnavailableError(f"the adapter {adapter.id} cannot be used: {adapter.problem}", code="adapter_failed")
        chosen[index] = as_float32(scale)
    return tuple(sorted((index, scale) for index, scale in chosen.items() if scale))


def _find(adapters: Sequence[AdapterInfo], name: str | int) -> int:
    for index, adapter in enumerate(adapters):
        if adapter.id == str(name):
            return index
    if isinstance(name, int) and 0 <= name < len(adapters):
        return name
    there = ", ".join(f"{adapter.id} (or {index})" for index, adapter in enumerate(adapters))
    raise RequestError(
        f"`lora`: this model has no adapter {str(name)[:100]!r}; "
        + (f"there is: {there}." if there else "it has none: `model.adapters` lists them."),
        param="lora",
        code="adapter_not_found",
    )


def as_float32(scale: float) -> float:
    """As llama.cpp takes it."""
    return float(struct.unpack("<f", struct.pack("<f", scale))[0])


def described(adapters: Sequence[AdapterInfo], chosen: Chosen) -> dict[str, Any] | None:
    """What a namespace's description has of them: by content and scale, and beside that their names.

    None while the content of one of them is not known.
    """
    if any(not adapters[index].sha256 for index, _ in chosen):
        return None
    found = sorted((adapters[index].sha256, scale) for index, scale in chosen)
    names = {ADAPTER_NAMES: sorted(adapters[index].id for index, _ in chosen)} if chosen else {}
    return {ADAPTERS: [{"sha256": sha256, "scale": scale} for sha256, scale in found], **names}
