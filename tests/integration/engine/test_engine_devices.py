"""Devices beside the CPU: named, refused by name, and how many layers fit them."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from homeprefixd.config import GPU_LAYERS_AUTO, ModelConfig
from homeprefixd.engine import building, devices, probe, probing
from homeprefixd.engine.bindings import Model
from homeprefixd.engine.devices import Device, choose_devices, layers_that_fit, list_devices, resolve_layers, taken
from homeprefixd.errors import ModelError
from homeprefixd.frames.worker import LoadModel
from homeprefixd.models.device_room import ask_devices, left_by, most_there, usable, weights_there
from tests.integration.engine.running import load_frame

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


def test_what_was_taken() -> None:
    now = [replace(TWO[0], free=4 * GIB), replace(TWO[1], free=21 * GIB)]
    assert taken(TWO, now) == {"CUDA0": 6 * GIB, "CUDA1": 0}
    assert taken([replace(one, own=False) for one in TWO], [replace(one, own=False) for one in now]) == {}


async def test_the_daemon_can_ask() -> None:
    assert await ask_devices(os.environ) == {device.name: device.free for device in list_devices() if device.own}


def test_room_on_devices() -> None:
    free = {"CUDA0": 10 * GIB, "CUDA1": 20 * GIB}
    assert usable(free, ModelConfig()) == {}
    assert usable(free, ModelConfig(gpu_layers=-1)) == free
    assert usable(free, ModelConfig(gpu_layers=GPU_LAYERS_AUTO, device="cuda1,Vulkan0")) == {"CUDA1": 20 * GIB}
    assert left_by(free, [{"CUDA0": 3 * GIB}, {"CUDA0": 9 * GIB, "Vulkan0": 1}]) == {"CUDA0": 0, "CUDA1": 20 * GIB}
    assert weights_there(9 * GIB, free) == {"CUDA0": 3 * GIB, "CUDA1": 6 * GIB}
    assert (most_there(99 * GIB, free), most_there(GIB, free), most_there(GIB, {})) == (21 * GIB, GIB, 0)
    assert weights_there(GIB, {}) == weights_there(GIB, {"CUDA0": 0}) == {}


def test_this_machine_can_be_asked() -> None:
    for device in list_devices():
        assert device.name
        assert 0 <= device.free <= device.total


def test_the_probe_computes_where_the_worker_will(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (devices, building):
        monkeypatch.setattr(module, "list_devices", lambda: TWO)
    told: list[LoadModel] = []
    monkeypatch.setattr(building, "probe", lambda load, directory: told.append(load))
    monkeypatch.setattr(Model, "load", refused)
    for layers, names in ((devices.AUTO, "cuda1"), (7, ""), (0, "")):
        asked = load_frame(demo_model, gpu_layers=layers, device=names, flash_if_gpu=True, probes=str(tmp_path))
        with pytest.raises(ModelError):
            building.build(asked, lambda frame: None, None)
    assert [(one.gpu_layers, one.device, one.flash_attention) for one in told] == [
        (-1, "CUDA1", True),
        (7, "CUDA0,CUDA1", True),
        (0, "", False),
    ]
    monkeypatch.setattr(probing, "become_child", lambda *_: None)
    loaded: list[tuple[int, list[str]]] = []

    def load(
        cls: type[Model], path: Path, log: object, *, gpu_layers: int, devices: list[Device], **_: object
    ) -> Model:
        loaded.append((gpu_layers, [device.name for device in devices]))
        raise ModelError("enough")

    monkeypatch.setattr(Model, "load", classmethod(load))
    for one in told:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(msgspec.msgpack.encode(one))))
        assert probing.main() == ModelError.exit_code
    assert loaded == [(-1, ["CUDA1"]), (7, ["CUDA0", "CUDA1"]), (0, [])]


def refused(*_arguments: object, **_named: object) -> Model:
    raise ModelError("enough")


def test_what_a_probe_is_remembered_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices and the library that computes, but not how many layers fitted at that start."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def key(**changes: object) -> str:
        return probe._key(load_frame(tmp_path / "m.gguf", **changes))

    some = key(gpu_layers=7, device="CUDA0")
    assert some == key(gpu_layers=9, device="CUDA0", threads=5, alias="x")
    others = [key(gpu_layers=7, device="CUDA1"), key(gpu_layers=-1, device="CUDA0"), key()]
    library = tmp_path / "libggml.so"
    for content in (b"1", b"12"):
        library.write_bytes(content)
        found = SimpleNamespace(version="1", files=[Path("libggml.so")], locate_file=lambda name: tmp_path / name)
        monkeypatch.setattr(probe, "distribution", lambda name, found=found: found)
        others.append(key(gpu_layers=7, device="CUDA0"))
    assert len({some, *others}) == 6
