"""Several models: loaded when they are asked for, unloaded in time or for others; with workers that compute nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from homeprefixd.api.observed import Observations, ObservedBackend
from homeprefixd.api.records import Records
from homeprefixd.config import AdapterConfig, Config, ModelConfig, ModelsConfig
from homeprefixd.errors import HomeprefixdError, ModelError, NotFoundError, UnavailableError
from homeprefixd.frames.worker import Delta, Tokenize
from homeprefixd.models.catalog import Catalog, ModelSpec
from homeprefixd.models.loading import WORKER_BYTES, Budget, load_frame
from homeprefixd.models.pool import Pool
from homeprefixd.models.resident import Resident
from homeprefixd.models.worker_link import Limits
from homeprefixd.supervise import Backoff
from tests.integration.daemon.house import House, fake, say, until

NEED = 100 << 20
"""Bytes of memory that each model takes."""

Make = Callable[..., Pool]


@pytest.fixture
def make(house: House, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A pool of models `a`, `b` and `c` without a main one, and room for `room` of them."""
    monkeypatch.setattr("homeprefixd.models.space.guess_memory", lambda spec, pool: NEED)
    monkeypatch.setattr(Resident, "measure", lambda self: None)

    def maker(*arguments: str, room: int = 1, patience: float = 20.0, main: str = "", **settings: float) -> Pool:
        def spec(alias: str) -> ModelSpec:
            model = ModelConfig(keep_alive=settings.get(alias, 0.0))
            return ModelSpec(alias, Path(f"/models/{alias}.gguf"), 1, 8, model)

        pool = Pool(
            Catalog([spec(alias) for alias in "abc"], main=main),
            lambda spec: load_frame(spec, Config(), cores=2, memory=1 << 20),
            fake("worker", *arguments),
            os.environ,
            None,
            budget=Budget(room * NEED, room * NEED, strict=True),
            limits=Limits(patience=0.2),
            backoff=lambda: Backoff(first=0.05),
            room_patience=patience,
        )
        house.pools.append(pool)
        pool.start()
        return pool

    return maker


def states(pool: Pool) -> str:
    """`a` to `c` as letters: Loaded, loading (.), Unloaded, Error."""
    letters = {"ok": "L", "loading": ".", "unloaded": "U", "error": "E"}
    return "".join(letters[known.state] for known in pool.known())


def pids(pool: Pool) -> set[int]:
    return {worker["pid"] for worker in pool.status()["workers"]}


async def words(pool: Pool, alias: str, prompt: str) -> list[str]:
    async with pool.generate(alias, say(f"{alias} {time.monotonic_ns()}", prompt)) as generation:
        return [event.text async for event in generation if isinstance(event, Delta)]


async def test_loaded_when_asked_for_and_not_before(make: Make) -> None:
    pool = make("--load-time", "0.5", room=3)
    await pool.first_loads()
    assert states(pool) == "UUU"
    assert pool.status()["state"] == "ok"
    assert pool.models() == []
    assert pool.resolve(None) == "a"
    assert await words(pool, "b", "say x") == ["x"]  # waited longer than `patience`
    assert states(pool) == "ULU"
    assert [info.alias for info in pool.models()] == ["b"]
    assert (await pool.convert("c", Tokenize("t", ["x"], False, True, False))).tokens == [1]
    assert states(pool) == "ULL"
    with pytest.raises(NotFoundError, match="there is: a, b, c"):
        await pool.load("d")


async def test_a_request_tells_that_its_model_was_loaded_first(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    records = Records()
    watched = ObservedBackend(make("--load-time", "0.5", room=3), Observations(), records=records)
    for rid in ("cold", "loaded"):
        async with watched.generate("b", say(rid, "say x")) as generation:
            assert [event.text async for event in generation if isinstance(event, Delta)] == ["x"]
    loaded, cold = records.newest(2)
    assert 500 <= cold.load_ms <= cold.first_ms
    assert loaded.load_ms < 100
    first, second = [record.message for record in caplog.records if "first token after" in record.message]
    assert f"({cold.load_ms / 1e3:.2f} s of it: the model was loaded first)" in first
    assert "of it" not in second


async def test_two_requests_at_once_load_it_once(make: Make, tmp_path: Path) -> None:
    pool = make("--load-time", "0.3", "--die", str(tmp_path / "loads"))
    replies = await asyncio.gather(*(words(pool, "b", f"say {n}") for n in range(8)))
    assert replies == [[str(n)] for n in range(8)]
    assert (tmp_path / "loads").read_text() == "1"


async def test_progress_is_told_while_it_loads(make: Make) -> None:
    pool = make("--load-time", "0.4", "--progress", "0.25")
    asked = asyncio.create_task(words(pool, "c", "say x"))
    await until(lambda: pool.status()["models"][2]["progress"] == 0.25)
    assert (pool.status()["state"], states(pool)) == ("ok", "UU.")
    assert await asked == ["x"]


async def test_the_least_recently_used_goes_first(make: Make) -> None:
    pool = make(room=2)
    await words(pool, "a", "say x")
    await words(pool, "b", "say x")
    await words(pool, "a", "say x")
    before = pids(pool)
    await words(pool, "c", "say x")
    assert states(pool) == "LUL"
    assert len(before & pids(pool)) == 1
    await words(pool, "b", "say x")
    assert states(pool) == "ULL"


async def test_the_main_model_and_pinned_ones_are_loaded_at_the_start(make: Make) -> None:
    pool = make(room=2, main="a", b=-1.0)
    assert pool.status()["state"] == "loading"
    await pool.first_loads()
    await until(lambda: states(pool) == "LLU")
    assert pool.status()["state"] == "ok"
    await words(pool, "a", "say x")
    await words(pool, "c", "say x")
    assert states(pool) == "ULL"  # not the pinned one, although a was used later


async def test_what_cannot_fit_is_refused_with_sizes(make: Make) -> None:
    pool = make(room=1, b=-1.0)
    await pool.first_loads()
    with pytest.raises(ModelError, match=r"a needs about 100.*take 100.*of which b keep 100.*models\.memory") as caught:
        await words(pool, "a", "say x")
    assert caught.value.code == "does_not_fit"
    assert states(pool) == "ELU"
    assert await words(pool, "b", "say x") == ["x"]


def pairs(*given: tuple[str, int, bytes]) -> bytes:
    """A GGUF file of these metadata: name, number of the type, value."""
    told = [
        struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value for name, kind, value in given
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(told)) + b"".join(told)


async def test_a_pool_is_as_large_as_pinned_models_leave_it(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is not refused that fits beside them with a smaller one."""
    monkeypatch.setattr(Resident, "measure", lambda self: None)
    arch = "general.architecture", 8, struct.pack("<Q", 5) + b"llama"
    numbers = {"block_count": 32, "embedding_length": 4096, "attention.head_count": 32, "context_length": 32768}
    path = tmp_path / "x.gguf"
    path.write_bytes(pairs(arch, *((f"llama.{name}", 4, struct.pack("<I", one)) for name, one in numbers.items())))
    small, gib = ModelConfig(ctx=256, pool=256, keep_alive=-1.0), 1 << 30
    specs = [ModelSpec("stays", path, 0, 3 * gib, small), ModelSpec("big", path, 0, 3 * gib // 2)]
    load = lambda spec: load_frame(spec, Config(), cores=2, memory=1 << 20)  # noqa: E731
    budget = Budget(5 * gib, 8 * gib, strict=True)
    pool = Pool(Catalog(specs), load, fake("worker"), os.environ, None, budget=budget)
    house.pools.append(pool)
    pool.start()
    await pool.first_loads()
    await pool.load("big")
    assert [known.state for known in pool.known()] == ["ok", "ok"]
    assert sum(known.memory for known in pool.known()) == budget.total
    told = pool._residents["big"].link
    assert told is not None
    assert told._load.memory == 2 * gib - 2 * WORKER_BYTES - 3 * gib // 2 - 256 * 32 * 4096 * 2 * 2


def on_gpu(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *aliases: str, size: int) -> Pool:
    """A pool of such models with `size` GiB of weights, a GPU of 24 GiB, and 16 GiB of RAM: `-` at the end of a name
    is one for the CPU, `!` a pinned one."""
    gib = 1 << 30

    async def devices(environ: Mapping[str, str]) -> dict[str, int]:
        return {"GPU0": 24 * gib}

    monkeypatch.setattr("homeprefixd.models.space.ask_devices", devices)
    path = tmp_path / "x.gguf"
    path.write_bytes(pairs(("general.architecture", 8, struct.pack("<Q", 5) + b"llama")))
    specs = [
        ModelSpec(
            alias.rstrip("-!"),
            path,
            0,
            gib if "-" in alias else size * gib,
            ModelConfig(gpu_layers=0 if "-" in alias else -2, keep_alive=-1.0 if "!" in alias else 0.0),
        )
        for alias in aliases
    ]
    load = lambda spec: load_frame(spec, Config(), cores=2, memory=1 << 20)  # noqa: E731
    budget = Budget(16 * gib, 16 * gib, strict=True)
    worker = fake("worker", "--on-device", str((size + 1) * gib))
    pool = Pool(Catalog(specs), load, worker, os.environ, None, budget=budget, room_patience=0.5)
    house.pools.append(pool)
    pool.start()
    return pool


async def test_what_lies_on_a_device_takes_no_ram(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = on_gpu(house, tmp_path, monkeypatch, "a", "b-", size=16)  # as large as all RAM
    await pool.load("b")
    await pool.load("a")
    assert states(pool) == "LL"
    assert pool.known()[0].memory == WORKER_BYTES
    assert pool._residents["a"].on_devices == {"GPU0": 17 << 30}


async def test_models_make_room_for_each_other_on_a_device(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = on_gpu(house, tmp_path, monkeypatch, "a", "b", "c-", size=10)
    await pool.load("c")
    await pool.load("a")
    await pool.load("b")
    assert states(pool) == "ULL"  # and not c, which is no help
    running = asyncio.create_task(words(pool, "b", "wait 1"))
    await until(lambda: pool.known()[1].requests == 1)
    with pytest.raises(UnavailableError, match="which b, c use for running requests"):
        await pool.load("a")
    await running
    await pool.load("a")
    assert states(pool) == "LUL"


async def test_what_stays_on_a_device_is_no_reason_to_wait(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many layers are put there as fit beside it; two that fit are both loaded."""
    pool = on_gpu(house, tmp_path, monkeypatch, "a!", "b", size=12)
    await pool.first_loads()
    await pool.load("b")
    assert states(pool) == "LL"
    small = on_gpu(house, tmp_path, monkeypatch, "a", "b", "c", size=4)
    for alias in "abc":
        await small.load(alias)
    assert states(small) == "LLL"


async def test_unused_models_are_unloaded_in_time(make: Make) -> None:
    pool = make(room=3, a=1.0, b=1e6)
    await words(pool, "a", "say x")
    await words(pool, "b", "say x")
    assert pool.known()[0].expires is not None
    running = asyncio.create_task(words(pool, "a", "wait 1.5"))  # for longer than it would stay
    await until(lambda: pool.known()[0].requests == 1)
    assert pool.known()[0].expires is None
    await running
    assert states(pool) == "LLU"
    await until(lambda: states(pool) == "ULU", 5)
    assert await words(pool, "a", "say again") == ["again"]


async def test_a_model_in_use_is_not_unloaded(make: Make) -> None:
    pool = make(room=1)
    running = asyncio.create_task(words(pool, "a", "wait 0.7"))
    await until(lambda: pool.known()[0].requests == 1 and states(pool) == "LUU")
    begin = time.monotonic()
    other = asyncio.create_task(words(pool, "b", "say other"))
    await until(lambda: pool._residents["a"].closing)
    third = asyncio.create_task(words(pool, "a", "say later"))  # waits for its turn behind b
    assert await running == []
    assert await other == ["other"]
    assert time.monotonic() - begin > 0.4
    assert await third == ["later"]
    assert states(pool) == "LUU"


async def test_whichever_model_is_idle_first_makes_room(make: Make) -> None:
    pool = make(room=2, patience=10.0)
    long = asyncio.create_task(words(pool, "a", "wait 3"))
    await until(lambda: pool.known()[0].requests == 1 and states(pool) == "LUU")
    short = asyncio.create_task(words(pool, "b", "wait 0.5"))
    await until(lambda: pool.known()[1].requests == 1 and states(pool) == "LLU")
    assert await words(pool, "c", "say x") == ["x"]
    assert short.done()
    assert not long.done()
    assert states(pool) == "LUL"
    assert await words(pool, "a", "say meanwhile") == ["meanwhile"]  # it is not closed any more
    assert not long.done()
    await long


async def test_waiting_for_memory_has_an_end(make: Make) -> None:
    pool = make(room=1, patience=0.3)
    running = asyncio.create_task(words(pool, "a", "wait 1.5"))
    await until(lambda: pool.known()[0].requests == 1 and states(pool) == "LUU")
    with pytest.raises(UnavailableError, match=r"b needs 100 .* which a use for running requests"):
        await words(pool, "b", "say x")
    assert await words(pool, "a", "say meanwhile") == ["meanwhile"]
    assert not running.done()
    await running
    assert await words(pool, "b", "say x") == ["x"]


async def test_unloading_by_hand(make: Make) -> None:
    pool = make(room=3)
    await pool.load("a")
    [pid] = pids(pool)
    assert await pool.unload("a")
    assert states(pool) == "UUU"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert await pool.unload("a")  # nothing to do
    running = asyncio.create_task(words(pool, "a", "wait 0.5"))
    await until(lambda: pool.known()[0].requests == 1 and states(pool) == "LUU")
    assert not await pool.unload("a")
    assert states(pool) == "LUU"
    assert await running == []
    await until(lambda: states(pool) == "UUU", 5)


async def test_keep_alive_of_a_load_counts_until_it_is_unloaded(make: Make) -> None:
    pool = make(room=3, a=1e6)
    await pool.load("a", 0.0)
    await until(lambda: states(pool) == "UUU", 5)
    await pool.load("a")
    assert (pool.known()[0].expires or 0) > 1e5
    await pool.load("a", -1)
    assert pool.known()[0].expires is None


async def test_one_that_cannot_be_loaded_leaves_the_others_alone(make: Make) -> None:
    pool = make("--fail-alias", "b", "--fail", "b.gguf is damaged", room=3, main="b")
    await pool.first_loads()
    assert states(pool) == "UEU"
    assert pool.status()["state"] == "ok"
    assert pool.resolve("b", usable=False) == "b"
    with pytest.raises(ModelError, match=r"/models/b\.gguf cannot be read"):
        await pool.file_facts("b")
    with pytest.raises(UnavailableError, match=r"b cannot be used now: b\.gguf is damaged"):
        pool.resolve("b")
    assert await words(pool, "a", "say x") == ["x"]
    with pytest.raises(ModelError, match="damaged"):  # somebody wants to know
        await pool.load("b")
    assert len(pids(pool)) == 1


async def test_a_killed_worker_does_not_disturb_another(make: Make) -> None:
    pool = make(room=2)
    await pool.load("a")
    await pool.load("b")
    running = asyncio.create_task(words(pool, "b", "wait 1"))
    await until(lambda: pool.known()[1].requests == 1)
    victim = next(worker["pid"] for worker in pool.status()["workers"] if worker["alias"] == "a")
    os.kill(victim, signal.SIGKILL)
    await until(lambda: states(pool) == ".LU")
    assert await running == []
    assert await words(pool, "a", "say back") == ["back"]


async def test_the_stop_ends_loads_and_those_who_wait(make: Make) -> None:
    pool = make("--load-time", "30", room=3)
    waiting = asyncio.create_task(words(pool, "a", "say x"))
    await until(lambda: states(pool) == ".UU" and bool(pids(pool)))
    pool.drain()
    with pytest.raises(HomeprefixdError, match="stopping"):
        await waiting
    await asyncio.wait_for(pool.stop(0.0), 10)


async def test_clients_that_leave_do_not_end_a_load(make: Make) -> None:
    pool = make("--load-time", "0.4")
    waiting = asyncio.create_task(words(pool, "a", "say x"))
    await until(lambda: states(pool) == ".UU")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: states(pool) == "LUU")
    assert pool.known()[0].requests == 0
    await words(pool, "b", "say x")
    assert states(pool) == "ULU"


async def test_a_folder_is_looked_through_again(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeprefixd.models.pool.LOOK_EVERY", 0.1)
    (tmp_path / "one.gguf").write_bytes(b"GGUF....")
    catalog = Catalog([], folder=tmp_path)
    catalog.look()
    load = lambda spec: load_frame(spec, Config(), cores=2, memory=1 << 20)  # noqa: E731
    pool = Pool(catalog, load, fake("worker"), os.environ, None, backoff=lambda: Backoff(first=0.05))
    house.pools.append(pool)
    pool.start()
    await pool.first_loads()
    assert [known.state for known in pool.known()] == ["ok"]  # the only one is loaded at once
    (tmp_path / "two.gguf").write_bytes(b"GGUF....")
    await pool.load("two")  # at once, although nobody has looked
    (tmp_path / "three.gguf").write_bytes(b"")
    await until(lambda: len(pool.known()) == 3)
    assert [known.alias for known in pool.known()] == ["one", "three", "two"]
    with pytest.raises(ModelError, match=r"three\.gguf is empty"):
        await words(pool, "three", "say x")
    (tmp_path / "three.gguf").write_bytes(b"GGUF....")
    await until(lambda: pool.known()[1].state == "unloaded")
    assert await words(pool, "three", "say whole") == ["whole"]
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.gguf").unlink()
    await pool.unload("two")
    await until(lambda: [known.alias for known in pool.known()] == ["one", "three"])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e308])
async def test_numbers_that_are_none_are_one_models_fault(house: House, tmp_path: Path, number: float) -> None:
    """At the start, found later, and as an adapter."""
    arch = "general.architecture", 8, struct.pack("<Q", 5) + b"llama"
    array = struct.pack("<IQd", 12, 1, number)
    (tmp_path / "kind.gguf").write_bytes(pairs(("general.type", 9, array)))
    (tmp_path / "one.gguf").write_bytes(pairs(arch))
    entry = ModelConfig(
        path=str(tmp_path / "one.gguf"), adapters=[AdapterConfig("style", str(tmp_path / "kind.gguf"))], ctx=512
    )
    other = ModelConfig(path=str(tmp_path / "kind.gguf"), ctx=512)
    catalog = Catalog.from_config(ModelConfig(path="none"), ModelsConfig(dir=str(tmp_path), entries=(entry, other)))
    budget = Budget(1 << 30, 1 << 30, strict=True)
    load = lambda spec: load_frame(spec, Config(), cores=2, memory=1 << 20)  # noqa: E731
    pool = Pool(catalog, load, fake("worker"), os.environ, None, budget=budget, backoff=lambda: Backoff(first=0.05))
    house.pools.append(pool)
    pool.start()
    await pool.first_loads()
    assert "one" in [known.alias for known in pool.known()]
    (tmp_path / "heads.gguf").write_bytes(pairs(arch, ("llama.attention.head_count", 9, array)))
    (tmp_path / "later.gguf").write_bytes(pairs(("general.type", 9, array)))
    with pytest.raises(ModelError, match=r"heads\.gguf is damaged"):
        await pool.load("heads")
    assert {known.alias: known.state for known in pool.known()}["heads"] == "error"
    assert "later" in [known.alias for known in pool.known()]
    problem = load(catalog.resolve("one")).adapters[0].problem
    assert "kind.gguf is" in problem
    assert await words(pool, "one", "say x") == ["x"]


class SlowCatalog(Catalog):
    """Whoever looks through the folder is held up after it was read: the first for longer."""

    def __init__(self, folder: Path) -> None:
        super().__init__([], folder=folder)
        self.waits: Iterator[float] = iter(())
        self.looks = 0

    def look(self) -> bool:
        changed = super().look()
        self._wait()
        return changed

    def search(self) -> tuple[ModelSpec, ...]:
        found = super().search()
        self._wait()
        return found

    def _wait(self) -> None:
        self.looks += 1
        time.sleep(next(self.waits, 0.0))


async def test_a_file_is_known_to_all_at_once(house: House, tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"GGUF....")
    catalog = SlowCatalog(tmp_path)
    catalog.look()
    catalog.waits = iter((0.6, 0.0))
    load = lambda spec: load_frame(spec, Config(), cores=2, memory=1 << 20)  # noqa: E731
    pool = Pool(catalog, load, fake("worker"), os.environ, None, backoff=lambda: Backoff(first=0.05))
    house.pools.append(pool)
    (tmp_path / "two.gguf").write_bytes(b"GGUF....")
    looks = catalog.looks
    looking = asyncio.create_task(pool._look())
    await until(lambda: catalog.looks > looks)
    await asyncio.sleep(0.1)
    with pytest.raises(NotFoundError):  # not yet; and nothing worse
        pool.resolve("two")
    (tmp_path / "three.gguf").write_bytes(b"GGUF....")
    await pool.load("three")
    assert looking.done()
    assert [pool.resolve(name) for name in ("one", "two", "three")] == ["one", "two", "three"]


async def test_a_request_that_was_made_before_its_file_changed(house: House, tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    path.write_bytes(b"GGUF....")
    catalog = Catalog([], folder=tmp_path)
    catalog.look()
    load = lambda spec: load_frame(spec, Config(), cores=2, memory=1 << 20)  # noqa: E731
    pool = Pool(catalog, load, fake("worker"), os.environ, None, backoff=lambda: Backoff(first=0.05))
    house.pools.append(pool)
    visit = pool.generate("one", say("r", "say x"))
    path.write_bytes(b"GGUF........")
    await pool._look()
    async with visit as generation:
        assert len(pids(pool)) == 1  # its worker is one of ours: ended with us, counted, unloaded in time
        assert [event.text async for event in generation if isinstance(event, Delta)] == ["x"]
