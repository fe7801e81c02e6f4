"""Devices beside the CPU: named, refused by name, and how many layers fit them."""

from __future__ import annotations

from pathlib import Path

import pytest

from homeprefixd.config import GPU_LAYERS_AUTO
from homeprefixd.engine import devices
from homeprefixd.engine.devices import Device, choose_devices, layers_that_fit, list_devices, resolve_layers
from homeprefixd.errors import ModelError

GIB = 1 << 30
TWO = [Device("CUDA0", "a card", 10 * GIB, 12 * GIB, 1), Device("CUDA1", "another", 20 * GIB, 24 * GIB, 2)]


def test_names() -> None:
    assert choose_devices("", TWO) == TWO
    assert choose_devices("cuda1", TWO) == TWO[1:]
    assert choose_devices(" CUDA1 , CUDA0 ", TWO) == TWO[::-1]
    with pytest.raises(ModelError, match=r"`model\.device` names Vulkan0, .*there is CUDA0, CUDA1"):
        choose_devices("CUDA0,Vulkan0", TWO)
    with pytest.raises(ModelError, match="computes on the CPU only"):
        choose_devices("CUDA0", [])


def test_layers_that_fit() -> None:
    assert layers_that_fit(7 * GIB, 31, 10 * GIB) == -1
    assert layers_that_fit(14 * GIB, 31, 10 * GIB) == 16  # half of 31 and the output
    assert layers_that_fit(14 * GIB, 31, 0) == 0
    assert layers_that_fit(14 * GIB, 0, GIB) == 0


def test_resolved(demo_model: Path) -> None:
    assert devices.AUTO == GPU_LAYERS_AUTO
    assert resolve_layers(devices.AUTO, demo_model, []) == resolve_layers(-1, demo_model, []) == 0
    assert resolve_layers(7, demo_model, TWO) == 7
    assert resolve_layers(devices.AUTO, demo_model, TWO) == -1
    small = [Device("CUDA0", "a small card", 70 << 20, 1 << 30, 1)]
    assert 10 <= resolve_layers(devices.AUTO, demo_model, small) < 30


def test_this_machine_can_be_asked() -> None:
    for device in list_devices():
        assert device.name
        assert 0 <= device.free <= device.total
