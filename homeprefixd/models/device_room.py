"""Memory of devices beside the CPU: what a model's weights may take of it, and whether others are in their way.

It is no part of the budget of RAM. The daemon loads nothing of llama.cpp, so a process of its own asks for it, once,
and only where a model is to compute on a device. A device that computes in RAM has none of its own, and is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

import msgspec

from ..config import DEVICE_WEIGHTS, ModelConfig
from ..supervise import child_environment, module_command

Bytes = Mapping[str, int]
"""By a device's name."""

_PATIENCE = 60.0  # s: a driver may have to wake a card first

logger = logging.getLogger(__name__)


async def ask_devices(environ: Mapping[str, str]) -> dict[str, int]:
    """What is free of each; nothing if that cannot be found out."""
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            *module_command("homeprefixd.engine.devices"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=child_environment(environ),
        )
        said, _ = await asyncio.wait_for(process.communicate(), _PATIENCE)
        return msgspec.json.decode(said, type=dict[str, int])
    except (OSError, TimeoutError, msgspec.MsgspecError) as error:
        logger.warning("how much memory the devices of llama.cpp have cannot be found out: %s", error)
        return {}
    finally:
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


def usable(free: Bytes, settings: ModelConfig) -> dict[str, int]:
    """Those that a model with these settings computes on."""
    if settings.gpu_layers == 0:
        return {}
    names = {name.strip().lower() for name in settings.device.split(",") if name.strip()}
    return {name: size for name, size in free.items() if not names or name.lower() in names}


def most_there(size: int, free: Bytes) -> int:
    """Of `size` bytes of weights, those that devices can hold of which so much is free: as many layers as fit."""
    return min(size, int(sum(free.values()) * DEVICE_WEIGHTS))


def weights_there(size: int, free: Bytes) -> dict[str, int]:
    """How those will lie on the devices."""
    room = sum(free.values())
    return {name: most_there(size, free) * one // room for name, one in free.items()} if room else {}


def left_by(free: Bytes, models: Iterable[Bytes]) -> dict[str, int]:
    """What is left of `free` by models that take so much of it."""
    taken = list(models)
    return {name: max(0, one - sum(model.get(name, 0) for model in taken)) for name, one in free.items()}
