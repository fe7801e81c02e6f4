"""The whole house with the demo model: daemon, store and worker as a user starts them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from homeprefixd.api.metrics import STORE, WORKER, with_zeros
from homeprefixd.bench.household import household_messages
from homeprefixd.bench.server import Server, free_port, homeprefixd
from homeprefixd.bench.stream import Answer, ask
from homeprefixd.config import AT_ONCE
from tests.processes import alive

FLAGS = ["--ctx", "4096", "--threads", "2"]


def body(question: str, *, size: int = 400, **more: Any) -> dict[str, Any]:
    """A greedy request over the household prompt."""
    return {"messages": household_messages(question, size=size), "temperature": 0, "max_tokens": 12, **more}


NO_PRELOAD = {"HOMEPREFIXD_CACHE_PRELOAD": "0"}  # so that what is read after a restart comes from the disk


def settled(server: Server) -> dict[str, Any]:
    """The store's figures once nothing waits to be written."""
    for _ in range(400):
        stats: dict[str, Any] = server.get("/cache/stats")
        if stats["queue"]["nodes"] == 0:
            return stats
        time.sleep(0.05)
    pytest.fail(f"the write queue does not empty: {stats}")


@pytest.fixture
def server(demo_model: Path, tmp_path: Path) -> Iterator[Server]:
    with homeprefixd(
        tmp_path / "cache", "--model", str(demo_model), *FLAGS, env={"HOMEPREFIXD_DEBUG_LOGITS": "1", **NO_PRELOAD}
    ) as one:
        yield one


def computed(answer: Answer) -> int:
    return int(answer.timings["prompt_n"])


def test_a_prefix_is_computed_once_and_survives_a_restart(server: Server) -> None:
    off = ask(server.url, body("Is the garden gate shut?", cache_prompt=False))
    cold = ask(server.url, body("Is the garden gate shut?"))
    hot = ask(server.url, body("Is the garden gate shut?"))
    other = ask(server.url, body("Who is at home?"))
    assert off.timings["cache_n"] == cold.timings["cache_n"] == 0
    assert hot.timings["cache_tiers"] == {"hot": hot.usage["prompt_tokens"] - 1}
    assert computed(hot) == 1
    assert other.timings["cache_tiers"]["hot"] == other.timings["cache_n"] > 300

    assert server.stop() == 0
    server.start()
    warm = ask(server.url, body("Is the garden gate shut?"))
    assert warm.timings["cache_tiers"] == {"warm": warm.usage["prompt_tokens"] - 1}
    new = ask(server.url, body("Which lamps are on?"))
    assert computed(new) == new.usage["prompt_tokens"] - new.timings["cache_n"] < 64
    assert off.text == cold.text == hot.text == warm.text
    newest, first = server.get("/cache/records")["records"]  # since the restart
    assert (first["gate"]["known"], first["gate"]["restored"]) == (warm.timings["cache_n"], warm.timings["cache_n"])
    assert (first["gate"]["tiers"], first["gate"]["reason"]) == (warm.timings["cache_tiers"], "unmeasured")
    assert newest["gate"]["disk_rate"] > 0
    for answer in (cold, hot, other, warm, new):
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == answer.timings["cache_n"]
        assert computed(answer) + answer.timings["cache_n"] == answer.usage["prompt_tokens"]


def test_the_first_question_after_a_restart_finds_the_prefix_in_memory(demo_model: Path, tmp_path: Path) -> None:
    with homeprefixd(tmp_path / "cache", "--model", str(demo_model), *FLAGS) as server:
        cold = ask(server.url, body("Is the garden gate shut?"))
        assert server.stop() == 0
        server.start()
        for _ in range(400):  # it is loaded beside the model, and on a busy machine maybe after it
            if server.get("/cache/stats")["hot"]["nodes"] * 64 >= cold.usage["prompt_tokens"]:
                break
            time.sleep(0.05)
        new = ask(server.url, body("Which lamps are on?"))
    assert set(new.timings["cache_tiers"]) == {"hot"}
    assert new.timings["cache_n"] > 300


def test_exact_reuse_gives_bit_identical_logits(demo_model: Path, tmp_path: Path) -> None:
    flags = ["--model", str(demo_model), *FLAGS, "--reuse", "exact"]
    with homeprefixd(tmp_path / "cache", *flags, env={"HOMEPREFIXD_DEBUG_LOGITS": "1", **NO_PRELOAD}) as server:
        off = ask(server.url, body("Is the garden gate shut?", cache_prompt=False))
        cold = ask(server.url, body("Is the garden gate shut?"))
        hot = ask(server.url, body("Is the garden gate shut?"))
        assert server.stop() == 0
        server.start()
        warm = ask(server.url, body("Is the garden gate shut?"))
        assert hot.timings["cache_tiers"]["hot"] == warm.timings["cache_tiers"]["warm"] >= 320
        other = ask(server.url, body("Who is at home?"))
    logits = {answer.timings["logits_sha256"] for answer in (off, cold, hot, warm)}
    assert len(logits) == 1
    assert logits != {""}
    assert other.timings["logits_sha256"] not in logits


def samples(server: Server) -> dict[str, float]:
    """What `/metrics` says now: `name{label="value"}` -> value, labels in the page's order."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items()) if key != "model"):
            sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }  # fmt: skip


def test_metrics_tell_what_replies_told(server: Server) -> None:
    answers = [ask(server.url, body(question)) for question in ("Is the gate shut?", "Is the gate shut?", "Who is it?")]
    deadline = time.monotonic() + 10
    while True:  # a worker tells its figures once a second
        seen = samples(server)
        if seen.get("homeprefixd_decode_tokens_total", 0) >= sum(a.usage["completion_tokens"] for a in answers) - 3:
            break
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)
    assert seen["homeprefixd_requests_total outcome=finished"] == 3
    assert seen["homeprefixd_prefix_tokens_total outcome=computed tier=none"] == sum(map(computed, answers))
    reused: Counter[str] = Counter()
    for answer in answers:
        reused.update(answer.timings["cache_tiers"])
    assert reused.total() > 600
    for tier, count in reused.items():
        assert seen[f"homeprefixd_prefix_tokens_total outcome=reused tier={tier}"] == count
    assert seen["homeprefixd_time_to_first_token_seconds_count cached=no"] == 1
    assert seen["homeprefixd_time_to_first_token_seconds_count cached=yes"] == 2
    assert abs(seen["homeprefixd_time_to_first_token_seconds_sum cached=no"] - answers[0].ttft) < 0.5
    tokens = sum(answer.usage["completion_tokens"] - 1 for answer in answers[1:])
    assert 0 < seen["homeprefixd_inter_token_seconds_count cached=yes"] <= tokens
    assert seen["homeprefixd_prefill_tokens_total"] == sum(map(computed, answers))
    assert 0 < seen["homeprefixd_prefill_seconds_total"] <= answers[0].ttft + 1
    assert seen["homeprefixd_restored_tokens_total"] == reused["hot"] + reused["warm"] > 0
    assert seen["homeprefixd_restore_seconds_total"] > 0
    assert seen["homeprefixd_kv_cells"] >= 4096
    assert seen["homeprefixd_model_loaded"] == seen["homeprefixd_models_loaded"] == seen["homeprefixd_store_up"] == 1
    assert seen["homeprefixd_cache_matched_tokens_total tier=hot"] == reused["hot"]
    assert seen["homeprefixd_cache_lookups_total outcome=hit"] == 2
    stats = settled(server)
    assert [figure.name for figure in STORE if figure.value(stats) is None] == []
    assert [figure.name for figure in WORKER if figure.value(with_zeros(stats["daemon"]["workers"][0])) is None] == []
    seen = samples(server)
    assert seen["homeprefixd_cache_bytes tier=warm"] == stats["warm"]["bytes"]
    assert seen["homeprefixd_cache_entries tier=hot"] == stats["hot"]["nodes"] > 5
    assert seen["homeprefixd_cache_written_bytes_total"] == stats["counters"]["written_bytes"] > 0


def test_llama_servers_other_routes(server: Server) -> None:
    text = "The quick brown fox: \u00e9\u4e2d\U0001f98a."
    tokens = server.post("/tokenize", {"content": text})["tokens"]
    assert server.post("/v1/detokenize", {"tokens": tokens}) == {"content": text}
    pieces = server.post("/tokenize", {"content": [text, tokens[0]], "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == [*tokens, tokens[0]]
    data = b"".join(bytes(p) if isinstance(p, list) else p.encode() for p in (piece["piece"] for piece in pieces[:-1]))
    assert data.decode() == text
    assert any(isinstance(piece["piece"], list) for piece in pieces)
    assert len(server.post("/tokenize", {"content": "<|im_start|>", "parse_special": False})["tokens"]) > 1
    [start] = server.post("/tokenize", {"content": "<|im_start|>"})["tokens"]
    request = body("Is the garden gate shut?", size=300)
    prompt = server.post("/apply-template", request)["prompt"]
    assert prompt.startswith("<|im_start|>system")
    assert prompt.endswith("Is the garden gate shut?<|im_end|>\n<|im_start|>assistant\n")
    counted = len(server.post("/tokenize", {"content": prompt, "add_special": True})["tokens"])
    assert ask(server.url, request).usage["prompt_tokens"] == counted
    props = server.get("/props")
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert "im_start" in props["chat_template"]
    assert props["eos_token"] == "<|im_end|>"
    assert not any(slot["is_processing"] for slot in server.get("/slots"))
    assert len(server.get("/slots")) == props["total_slots"] == AT_ONCE
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post("/detokenize", {"tokens": [start, 10_000_000]})
    with caught.value as refused:
        assert refused.code == 400
        assert json.load(refused)["error"]["type"] == "invalid_request_error"


def test_the_next_turn_starts_after_the_reply(server: Server) -> None:
    first = ask(server.url, body("Tell me about the house.", max_tokens=70))
    settled(server)
    messages = household_messages("Tell me about the house.", size=400)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And the garden?"}]
    second = ask(server.url, {"messages": messages, "temperature": 0, "max_tokens": 8})
    assert second.timings["cache_n"] >= first.usage["total_tokens"] - 2


def test_shared_blocks_are_stored_once(server: Server) -> None:
    ask(server.url, body("How warm is it?"))
    one = settled(server)["warm"]["nodes"]
    for number in range(3):
        ask(server.url, body(f"How warm is room number {number}?"))
    assert settled(server)["warm"]["nodes"] - one <= 3 * 2


def test_two_apps_stream_at_once(server: Server) -> None:
    ask(server.url, body("Hello."))  # the prefix is known, so that both decode at the same time
    answers: dict[int, Answer] = {}

    def app(number: int) -> None:
        request = body(f"Story number {number}.", max_tokens=80, ignore_eos=True)
        answers[number] = ask(server.url, request)

    threads = [threading.Thread(target=app, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answers[1].usage["completion_tokens"] == answers[2].usage["completion_tokens"] == 80
    assert answers[1].arrivals[0] < answers[2].arrivals[-1]
    assert answers[2].arrivals[0] < answers[1].arrivals[-1]


def test_a_client_that_leaves_ends_its_work_and_loses_nothing(server: Server) -> None:
    request = json.dumps({**body("Anything.", size=2200), "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/chat/completions", request, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 30
    while samples(server).get("homeprefixd_prefill_tokens_total", 0) < 64:  # a worker tells its figures once a second
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    ask(server.url, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
    done = server.post("/cache/match", body("Anything.", size=2200))["cached_tokens"]
    assert 64 <= done < 2000, "nothing was kept, or it went on with nobody there"


def test_purge_reaches_every_tier(server: Server) -> None:
    ask(server.url, body("Is the garden gate shut?"))
    settled(server)
    purged = server.post("/cache/purge", {"all": True})
    assert purged["nodes"] > 5
    stats = settled(server)
    assert stats["hot"]["nodes"] == stats["warm"]["nodes"] == 0
    assert ask(server.url, body("Is the garden gate shut?")).timings["cache_n"] == 0
    [prefix] = server.get("/cache/prefixes")["prefixes"]
    server.post("/cache/purge", {"prefix": prefix["id"]})
    assert server.get("/cache/prefixes")["prefixes"] == []


def test_a_dead_worker_comes_back_hot(server: Server) -> None:
    before = ask(server.url, body("Is the garden gate shut?"))
    assert server.process is not None
    [worker] = [p for p in psutil.Process(server.process.pid).children() if "engine.worker" in " ".join(p.cmdline())]
    worker.kill()
    deadline = time.monotonic() + 60
    while worker.is_running() or not server.healthy():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    after = ask(server.url, body("Is the garden gate shut?"))
    assert after.text == before.text
    assert after.timings["cache_tiers"] == {"hot": before.usage["prompt_tokens"] - 1}


def test_nothing_outlives_the_daemon(server: Server) -> None:
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 2
    server.kill()
    deadline = time.monotonic() + 5
    while any(alive(child.pid) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def refused(*flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and stderr of a daemon that is expected not to start."""
    done = subprocess.run(
        [sys.executable, "-m", "homeprefixd", "serve", "--port", str(free_port()), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode, done.stderr


def test_refusals_at_start_say_what_to_change(demo_model: Path, tmp_path: Path) -> None:
    cache = ["--cache-dir", str(tmp_path / "cache")]
    text = tmp_path / "text.gguf"
    text.write_text("this is not a model")
    short = tmp_path / "short.gguf"
    short.write_bytes(demo_model.read_bytes()[:3_000_000])
    empty = tmp_path / "empty.gguf"
    empty.touch()
    file = tmp_path / "file"
    file.touch()
    busy = socket.socket()
    busy.bind(("127.0.0.1", 0))
    busy.listen()
    cases: list[tuple[list[str], int, str]] = [
        (["--model", str(tmp_path / "missing.gguf"), *cache], 3, "missing.gguf"),
        (["--model", str(text), *cache], 3, "text.gguf"),
        (["--model", str(short), *cache], 3, "short.gguf"),
        (["--model", str(empty), *cache], 3, "empty.gguf"),
        (["--model", str(tmp_path), *cache], 3, str(tmp_path)),
        (["--model", str(demo_model), "--cache-dir", str(file / "below")], 6, str(file)),
        (["--model", str(demo_model), "--port", str(busy.getsockname()[1]), *cache], 2, "port"),
        (["--model", str(demo_model), "--hot", "lots", *cache], 2, "hot"),
    ]
    with contextlib.closing(busy):
        for flags, status, word in cases:
            got, said = refused(*flags)
            assert got == status, (flags, got, said)
            assert word in said, (flags, said)
            assert "Traceback" not in said, (flags, said)


def test_two_daemons_do_not_share_a_directory(server: Server, demo_model: Path, tmp_path: Path) -> None:
    status, said = refused("--model", str(demo_model), "--cache-dir", str(tmp_path / "cache"))
    assert status == 6
    assert "in use" in said or "another" in said
    assert "Traceback" not in said


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs root to mount a small tmpfs")
def test_a_full_disk_costs_nobody_an_error(demo_model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], check=True)
    try:
        flags = ["--model", str(demo_model), *FLAGS, "--hot", "256MiB", "--warm", "1GiB"]
        with homeprefixd(disk / "cache", *flags) as server:
            first = ask(server.url, body("Is the garden gate shut?", size=700))
            deadline = time.monotonic() + 30
            while server.get("/cache/stats")["warm"]["state"] != "full":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            again = ask(server.url, body("Is the garden gate shut?", size=700))
            assert again.text == first.text
            assert again.timings["cache_tiers"] == {"hot": first.usage["prompt_tokens"] - 1}
            stats = server.get("/cache/stats")
            assert stats["warm"]["state"] == "full"
            assert server.stop() == 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_damaged_file_costs_nobody_an_error_and_changes_no_answer(server: Server, tmp_path: Path) -> None:
    question = body("Is the garden gate shut?")
    cold = ask(server.url, question)
    settled(server)
    assert server.stop() == 0
    file = tmp_path / "cache" / "data.mdb"
    data = bytearray(file.read_bytes())
    choose = random.Random(1)
    tree = [at for at in range(8192, len(data), 4096) if data[at + 10] & 3]
    for at in (*choose.sample(tree, len(tree) // 3), *choose.sample(range(8192, len(data)), 20)):
        data[at + choose.randrange(min(4096, len(data) - at))] ^= 1 << choose.randrange(8)
    file.write_bytes(data)
    server.start()
    until = time.monotonic() + 60
    while True:  # the store may have to be started again
        answer = ask(server.url, question)
        assert answer.text == cold.text
        if answer.timings["cache_n"] > 300:
            break
        assert time.monotonic() < until, "what is computed again is not kept"


def test_the_closed_store_can_be_listed_and_purged(server: Server, tmp_path: Path) -> None:
    ask(server.url, body("Is the garden gate shut?"))
    assert server.stop() == 0

    def command(*words: str) -> Any:
        argv = [sys.executable, "-m", "homeprefixd", *words, "--cache-dir", str(tmp_path / "cache"), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)

    assert command("stats")["warm"]["nodes"] > 5
    [prefix] = command("ls")["prefixes"]
    assert prefix["tokens"] > 350
    assert prefix["preview"]
    assert command("purge", "--prefix", prefix["id"], "--yes")["nodes"] > 5
    assert command("ls")["prefixes"] == []
