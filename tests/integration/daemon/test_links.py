"""Pool and store link against real processes that speak the frames."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

import pytest

from homeprefixd.config import AT_ONCE
from homeprefixd.errors import (
    BusyError,
    ContextOverflowError,
    HomeprefixdError,
    ModelError,
    NotFoundError,
    StoreError,
    UnavailableError,
    WorkerDiedError,
)
from homeprefixd.frames.store import Purge
from homeprefixd.frames.worker import Accepted, Delta, Detokenize, Finished, Progress, Tokenize
from homeprefixd.models.pool import Pool
from homeprefixd.models.store_link import StoreLink
from homeprefixd.models.worker_link import Limits
from tests.integration.daemon.house import House, say, until


async def words(pool: Pool, rid: str, prompt: str) -> list[str]:
    async with pool.generate("fake", say(rid, prompt)) as generation:
        return [event.text async for event in generation if isinstance(event, Delta)]


async def start(store: StoreLink) -> None:
    await store.launch()
    assert await store.answers(20)


async def ready(pool: Pool) -> Pool:
    pool.start()
    await asyncio.wait_for(pool.first_loads(), 20)
    return pool


def pid_of(pool: Pool) -> int:
    pid = pool.status()["workers"][0]["pid"]
    assert isinstance(pid, int)
    return pid


# ------------------------------------------------------------------------------------------------- the pool


async def test_events_come_in_order(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_X", "1")
    pool = house.pool()
    assert pool.status()["state"] == "loading"
    assert pool.models() == []
    await ready(pool)
    assert pool.status()["state"] == "ok"
    [model] = pool.models()
    assert model.description == "{'GGML_NO_BACKTRACE': '1', 'MALLOC_ARENA_MAX': '2'}"
    assert pool.resolve(None) == pool.resolve("fake") == pool.resolve("fake.gguf") == "fake"
    assert pool.created("fake") == 12345
    async with pool.generate("fake", say("r1", "say a b")) as generation:
        events = [event async for event in generation]
    assert [type(event) for event in events] == [Accepted, Progress, Delta, Delta, Finished]
    await asyncio.wait_for(pool.idle(), 1)
    with pytest.raises(NotFoundError, match="there is: fake"):
        pool.resolve("other")


async def test_the_end_of_a_reply_comes_with_what_is_told_of_its_prompt(house: House) -> None:
    """The worker tells of it on another thread, and may be later than the end of a very short reply."""
    pool = await ready(house.pool())
    for number in range(3):
        async with pool.generate("fake", say(f"r{number}", "account-late")) as generation:
            async for event in generation:
                if isinstance(event, Finished):
                    assert getattr(generation, "account", None) is not None
    assert await asyncio.wait_for(words(pool, "r9", "say a b"), 5) == [
        "a",
        "b",
    ]  # nothing is told: it ends all the same


async def test_an_error_of_the_worker_arrives_as_itself(house: House) -> None:
    pool = await ready(house.pool())
    with pytest.raises(ContextOverflowError, match="too long") as caught:
        await words(pool, "r", "error")
    assert caught.value.details == {"n_prompt_tokens": 9, "n_ctx": 4}


async def test_leaving_early_cancels(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool = await ready(house.pool())
    async with pool.generate("fake", say("r-left", "wait 30")) as generation:
        async for event in generation:
            assert isinstance(event, Accepted)
            break
    await until(lambda: "cancelled r-left" in caplog.text)
    await words(pool, "r-done", "say a")
    await asyncio.sleep(0.1)
    assert "cancelled r-done" not in caplog.text


@pytest.mark.parametrize(
    ("order", "said"), [("kill", "killed by SIGKILL"), ("abort", r"SIGABRT: .*GGML_ASSERT\(a == b\)")]
)
async def test_a_dead_worker_fails_its_requests_and_comes_back(house: House, order: str, said: str) -> None:
    pool = await ready(house.pool())
    before = pid_of(pool)
    running = asyncio.create_task(words(pool, "r1", "wait 30"))
    await until(lambda: pool.status()["workers"][0]["running"] == 1)
    with pytest.raises(WorkerDiedError, match=said) as caught:
        await words(pool, "r2", order)
    assert caught.value.details["retry_after"] >= 1
    with pytest.raises(WorkerDiedError, match="send the request again"):
        await running
    assert pool.status()["state"] == "loading"
    assert pool.resolve("fake") == "fake"
    assert await words(pool, "r3", "say back again") == ["back", "again"]  # waited for the new process
    assert pid_of(pool) != before
    assert pool.status()["workers"][0]["restarts"] == 1
    assert len(pool.models()) == 1


@pytest.mark.parametrize(("progress", "said"), [("0.25", "25%"), ("0.999", "99%"), ("1.0", "99%")])
async def test_requests_wait_some_seconds_for_a_model_that_loads(house: House, progress: str, said: str) -> None:
    pool = house.pool("--load-time", "1.5", "--progress", progress, limits=Limits(patience=0.3))
    pool.start()
    await until(lambda: pool.status()["progress"] > 0)
    begin = time.monotonic()
    with pytest.raises(UnavailableError, match=f"loading, {said} done") as caught:
        await words(pool, "r1", "say a")
    assert time.monotonic() - begin > 0.2
    assert caught.value.details["retry_after"] >= 1
    patient = house.pool("--load-time", "0.3")
    patient.start()
    assert await words(patient, "r2", "say a") == ["a"]


async def test_questions_get_their_answers_or_an_error(house: House) -> None:
    pool = await ready(house.pool())

    async def tokens(rid: str) -> list[int]:
        return (await pool.convert("fake", Tokenize(rid, ["x", 1, 2], False, True, False))).tokens

    # fake_worker.py answers no Detokenize
    open_ones = [asyncio.create_task(pool.convert("fake", Detokenize(f"q{number}", [1]))) for number in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(BusyError, match="64 questions"):
        await tokens("one too many")
    open_ones[0].cancel()
    await asyncio.gather(open_ones[0], return_exceptions=True)
    assert await tokens("t1") == [3]  # what came before it has been read too
    os.kill(pid_of(pool), signal.SIGKILL)
    for task in open_ones[1:]:
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await asyncio.wait_for(task, 20)
    assert await tokens("t2") == [3]  # by the next one


async def test_a_model_that_cannot_be_loaded(house: House) -> None:
    pool = house.pool("--fail", "/models/fake.gguf is damaged", backoff=30)
    pool.start()
    with pytest.raises(ModelError, match=r"fake\.gguf is damaged") as caught:
        await asyncio.wait_for(pool.first_loads(), 20)
    assert caught.value.exit_code == 3
    assert pool.status()["state"] == "error"
    with pytest.raises(UnavailableError, match="is damaged"):
        pool.resolve(None)


async def test_killed_while_loading_is_tried_again_but_not_for_ever(house: House, tmp_path: object) -> None:
    pool = house.pool("--die", f"{tmp_path}/one", "--deaths", "2")
    await ready(pool)
    hopeless = house.pool("--die", f"{tmp_path}/two", "--deaths", "99")
    hopeless.start()
    with pytest.raises(ModelError, match=r"fake\.gguf cannot be loaded: .*SIGKILL.*memory"):
        await asyncio.wait_for(hopeless.first_loads(), 20)


@pytest.mark.parametrize(("order", "said"), [("stop-beating", "no heartbeat"), ("stand-still", "stood still")])
async def test_a_stuck_worker_is_killed(house: House, order: str, said: str) -> None:
    limits = Limits(silence=0.6, stalled=0.6, check_every=0.1)
    pool = await ready(house.pool(limits=limits))
    with pytest.raises(WorkerDiedError, match=said):
        await words(pool, "r", f"{order} 30")
    assert await words(pool, "r2", "say fine") == ["fine"]


async def test_a_stopped_process_is_noticed_too(house: House) -> None:
    pool = await ready(house.pool(limits=Limits(silence=0.5, check_every=0.1)))
    pid = pid_of(pool)
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: pool.status()["workers"][0]["restarts"] == 1)
    assert pid_of(pool) != pid


async def test_a_busy_worker_is_left_alone(house: House) -> None:
    pool = await ready(house.pool(limits=Limits(silence=0.5, stalled=0.5, check_every=0.1)))
    await words(pool, "r", "wait 1.5")
    assert pool.status()["workers"][0]["restarts"] == 0


async def test_a_reader_that_takes_nothing_is_cancelled(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool = await ready(house.pool(limits=Limits(unread=1 << 20)))
    async with pool.generate("fake", say("slow", "flood")) as generation:
        await until(lambda: "cancelled slow" in caplog.text)
        with pytest.raises(HomeprefixdError, match="too slowly"):
            async for _event in generation:
                pass
    assert await words(pool, "r2", "say fine") == ["fine"]


async def test_too_many_requests_are_refused(house: House) -> None:
    pool = await ready(house.pool())
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(words(pool, f"r{n}", "wait 1")) for n in range(64 + AT_ONCE)]
        await until(lambda: pool.status()["workers"][0]["requests"] == 64 + AT_ONCE)
        with pytest.raises(BusyError) as caught:
            pool.generate("fake", say("one-more", "say a"))
        assert caught.value.details["retry_after"] > 0
    assert all(task.done() for task in tasks)
    assert await words(pool, "again", "say a") == ["a"]


async def test_draining_refuses_new_requests_and_lets_running_ones_end(house: House) -> None:
    pool = await ready(house.pool())
    running = asyncio.create_task(words(pool, "r1", "wait 0.5"))
    await until(lambda: pool.status()["workers"][0]["requests"] == 1)
    pool.drain()
    with pytest.raises(UnavailableError, match="stopping"):
        pool.resolve(None)
    with pytest.raises(UnavailableError, match="stopping"):
        pool.generate("fake", say("r2", "say a"))
    assert pool.status()["state"] == "stopping"
    await asyncio.wait_for(pool.idle(), 5)
    assert await running == []


async def test_stop_ends_what_still_runs(house: House) -> None:
    pool = await ready(house.pool())
    running = asyncio.create_task(words(pool, "r1", "wait 30"))
    await until(lambda: pool.status()["workers"][0]["requests"] == 1)
    pid = pid_of(pool)
    await pool.stop(0.0)
    with pytest.raises(UnavailableError, match="stopping"):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ------------------------------------------------------------------------------------------------- the store


async def test_the_store_answers_the_admin(house: House) -> None:
    store = await house.store()
    with pytest.raises(UnavailableError, match="it starts"):
        await store.stats()
    await start(store)
    stats = await store.stats()
    assert stats["pid"] == store.pid
    assert (await store.prefixes(10, "")).total == 7
    assert (await store.purge(Purge(0, all=True))).nodes == 3
    with pytest.raises(NotFoundError, match="no prefix ffff"):
        await store.purge(Purge(0, prefix="ffff"))


async def test_a_directory_that_cannot_be_used_is_told(house: House) -> None:
    store = await house.store("--fail", "the cache directory /x is on NFS")
    with pytest.raises(StoreError, match=r"^the cache directory /x is on NFS$") as caught:
        await start(store)
    assert caught.value.exit_code == 6


async def test_each_new_store_gets_the_worker(house: House) -> None:
    store = await house.store()
    pool = house.pool(store=store)
    await start(store)
    await ready(pool)
    await until(lambda: pool.status()["state"] == "ok")
    first = f"store-{store.pid}"
    assert await words(pool, "r1", "stores") == [first]
    os.kill(store.pid or 0, signal.SIGKILL)
    await until(lambda: store.status()["state"] == "away")
    with pytest.raises(UnavailableError, match="SIGKILL"):
        await store.stats()
    assert await words(pool, "r2", "say without it") == ["without", "it"]
    await until(lambda: store.status()["state"] == "ok")
    assert await words(pool, "r3", "stores") == [first, f"store-{store.pid}"]
    assert (await store.stats())["adopted"] == ["worker fake"]
    os.kill(pid_of(pool), signal.SIGKILL)
    await until(lambda: pool.status()["state"] == "loading")
    assert await words(pool, "r4", "stores") == [f"store-{store.pid}"]


async def test_a_store_that_starts_late_is_used_then(house: House) -> None:
    store = await house.store()
    pool = await ready(house.pool(store=store))
    assert await words(pool, "r1", "stores") == []
    await start(store)
    assert await words(pool, "r2", "stores") == [f"store-{store.pid}"]


async def test_a_store_that_answers_nothing_is_killed(house: House) -> None:
    store = await house.store("--mute", ping_every=0.1, ping_timeout=0.3)
    await start(store)
    pid = store.pid
    await until(lambda: store.pid not in (pid, None))
    assert store.status()["restarts"] >= 1


async def test_a_store_that_does_not_answer_does_not_hold_the_start(house: House) -> None:
    store = await house.store("--fail", "")  # argparse: no failure
    await store.launch()
    begin = time.monotonic()
    assert not await store.answers(0.001)
    assert time.monotonic() - begin < 5
