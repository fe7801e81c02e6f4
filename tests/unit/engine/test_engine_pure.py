"""Parts of the engine that need no model: chunks, kernels, hashes of files, capacity, settings of samplers."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeprefixd.chat.stream import TextStream
from homeprefixd.engine import capacity, fingerprint, kernels
from homeprefixd.engine.cells import CellLedger
from homeprefixd.engine.chunks import chunk_end, longest_call
from homeprefixd.engine.failures import DecodeError, failure_of
from homeprefixd.engine.model_files import model_files
from homeprefixd.engine.prefills import Prefills
from homeprefixd.engine.sampling import check_sampling
from homeprefixd.engine.sequence import Phase, Request, Sequence
from homeprefixd.engine.shares import Shares, head_start
from homeprefixd.errors import BusyError, ModelError, RequestError
from homeprefixd.frames.worker import Sampling
from homeprefixd.prefix.blocks import Namespace, chain, to_le


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 16))
def test_prefill_calls_stay_on_the_grid(start: int, rest: int, blocks: int) -> None:
    total, most = start + rest, 64 * blocks
    edges = [start]
    while edges[-1] < total:
        edges.append(chunk_end(edges[-1], total, most))
    assert edges[-1] == total
    for begin, end in itertools.pairwise(edges):
        assert 0 < end - begin <= most
        if begin % 64 == 0 and total - begin >= 64:
            assert end % 64 == 0  # a remainder is never appended to whole blocks


def test_calls_after_a_cut_block() -> None:
    assert chunk_end(70, 300, 512) == 128
    assert chunk_end(70, 134, 512) == 134  # little: in one call
    assert chunk_end(70, 135, 512) == 128


def test_short_calls_are_as_long_as_they_may_be() -> None:
    """The grid does not matter to them, and each costs others a step."""
    edges = [0]
    while edges[-1] < 150:
        edges.append(chunk_end(edges[-1], 150, 40))
    assert edges == [0, 40, 80, 120, 150]


@pytest.mark.parametrize(
    ("allowed", "whole_blocks", "expected"),
    [
        (2500.0, False, 512),
        (150.0, False, 128),
        (64.0, False, 64),
        (63.5, True, 64),
        (63.5, False, 56),
        (20.0, False, 16),
        (8.5, False, 8),
        (0.5, False, 8),
        (-3.0, False, 8),
        (0.5, True, 64),
    ],
)
def test_calls_take_no_longer_than_others_may_stall(allowed: float, whole_blocks: bool, expected: int) -> None:
    assert longest_call(allowed, 512, whole_blocks=whole_blocks) == expected


def waiting(tokens: int, arrived: float, urgency: float = 0.0, done: int = 0) -> Sequence:
    request = Request("r", list(range(tokens)), 8, [], Sampling(), True, True, "", arrived)
    sequence = Sequence(request, list(range(tokens)), TextStream([]))
    sequence.n_past, sequence.phase, sequence.urgency = done, Phase.PREFILL, urgency
    return sequence


def called(made: Prefills, call: float, token: float, times: int) -> list[int]:
    """Tokens of calls beside others, each of which takes so many seconds, and for each token so many more."""
    sequence, found = waiting(100_000, 0.0), []
    for _ in range(times):
        count = made.longest(beside_others=True)
        made.account(sequence, sequence.n_past + count, call + token * count)
        found.append(count)
    return found


@pytest.mark.parametrize(
    ("call", "token", "expected"),
    [(0.1, 0.006, {64}), (0.25, 0.004, {56, 64}), (0.0, 0.02, {24}), (0.0, 0.012, {40, 48}), (0.1, 0.001, {384, 448})],
)
@pytest.mark.parametrize("first", [8, 64, 512])
def test_calls_become_as_long_as_others_may_stall(call: float, token: float, expected: set[int], first: int) -> None:
    """Most of a short one is what each call costs: that must not make the next ones shorter."""
    made = Prefills(512, 0.5, Shares(), defaultdict(float), exact=False, gate=None)
    made.account(waiting(1000, 0.0), first, call + token * first)
    found = called(made, call, token, 40)
    assert set(found[20:]) <= expected
    assert all(call + token * count <= 0.75 for count in found[1:])
    made.account(waiting(100, 0.0), 12, call + token * 12)  # the end of a prompt tells little
    assert set(called(made, call, token, 4)) <= expected


def test_calls_are_shorter_when_they_take_longer_than_they_did() -> None:
    made = Prefills(512, 0.5, Shares(), defaultdict(float), exact=False, gate=None)
    assert called(made, 0.02, 0.006, 10)[-1] == 64
    assert called(made, 0.04, 0.012, 3)[1:] == [32, 40]
    assert called(made, 0.02, 0.006, 10)[-1] == 64


def test_a_cached_prompt_does_not_wait_for_a_long_one_that_came_before() -> None:
    """On a machine that computes 100 tokens a second."""
    made = Prefills(512, 0.5, Shares(), defaultdict(float), exact=False, gate=None)
    now = time.perf_counter()
    long, short = waiting(3900, now - 22), waiting(2000, now - 1, done=1980)
    made.account(long, 64, 0.64)
    assert made.choose([long, short]) is short
    assert made.choose([short, waiting(2000, now - 1, urgency=6000.0, done=1970)]) is not short


def test_short_prompts_and_one_whose_turn_it_is_have_half_of_the_time_each() -> None:
    made = Prefills(512, 0.5, Shares(), defaultdict(float), exact=False, gate=None)
    now = time.perf_counter()
    ancient, seconds = waiting(3900, now - 100), {True: 0.0, False: 0.0}
    made.account(waiting(1000, now), 64, 0.64)
    for index in range(60):
        chosen = made.choose([ancient, waiting(40, now - 1), waiting(3000, now - 1)])
        assert chosen is not None
        if not index:
            assert len(chosen.tokens) == 40
        took = 0.4 if chosen is ancient else 0.1
        seconds[chosen is ancient] += took
        made.account(chosen, chosen.n_past + (40 if chosen is ancient else len(chosen.tokens)), took)
    assert 0.4 < seconds[True] / (seconds[True] + seconds[False]) < 0.6


def test_what_was_long_ago_is_not_owed() -> None:
    made = Prefills(512, 0.5, Shares(), defaultdict(float), exact=False, gate=None)
    now = time.perf_counter()
    made.account(waiting(1000, now), 64, 0.64)
    ancient, short = waiting(3900, now - 1000), waiting(40, now - 1)
    for _ in range(20):
        assert made.choose([ancient]) is ancient
        made.account(ancient, ancient.n_past + 64, 0.64)
    assert made.choose([ancient, short]) is short


def test_a_short_background_prompt_is_computed_before_a_long_one() -> None:
    made = Prefills(512, 0.5, Shares(), defaultdict(float), exact=False, gate=None)
    now = time.perf_counter()
    title, long, chat = waiting(300, now, head_start("background")), waiting(3900, now), waiting(1000, now)
    voice = waiting(3000, now, head_start("interactive"))
    found = []
    residents = [title, long, chat, voice]
    while residents:
        chosen = made.choose(residents)
        assert chosen is not None
        residents.remove(chosen)
        found.append(chosen)
    assert found == [voice, chat, title, long]


def test_shared_cells_are_counted_once() -> None:
    cells = CellLedger()
    cells.enter(0)
    assert cells.used({0: 100}) == 100
    cells.enter(1)
    cells.share(0, 1, 64)
    assert cells.used({0: 100, 1: 64}) == 100
    assert cells.used({0: 100, 1: 80}) == 116
    cells.enter(2)
    cells.share(1, 2, 70)  # six of them are sequence 1's own
    assert cells.used({0: 100, 1: 80, 2: 90}) == 136
    cells.leave(0)
    assert cells.used({1: 80, 2: 90}) == 80 + 20
    cells.leave(1)
    assert cells.used({2: 90}) == 90
    cells.leave(2)
    assert cells.used({}) == 0


def test_heavy_use_sets_a_client_back_and_is_forgotten() -> None:
    shares = Shares()
    shares.count("camera", prefilled=1600, generated=100, now=0.0)
    shares.count("voice", prefilled=10, now=0.0)
    assert shares.behind("camera", 0.0) == 2400
    assert shares.behind("camera", 60.0) == 1200
    assert shares.behind("voice", 0.0) == 10
    assert shares.behind("new", 0.0) == 0
    shares.count("camera", prefilled=10**9, now=60.0)
    assert shares.behind("camera", 60.0) < head_start("interactive")  # never as far as a class


def test_who_is_refused_is_told_how_long_requests_take() -> None:
    shares = Shares()
    assert shares.retry_after(64, 4) == 1  # nothing is known yet
    shares.served(10.0)
    assert shares.retry_after(7, 4) == 20
    shares.served(20.0)
    assert shares.retry_after(7, 4) == 24  # the mean follows
    assert shares.retry_after(10**6, 1) == 600


@pytest.mark.parametrize(
    ("comment", "broken"),
    [
        (b"GCC: (Debian 12.2.0-14+deb12u1) 12.2.0", True),
        (b"GCC: (Ubuntu 13.2.0) 13.2.0", True),
        (b"GCC: (Debian 14.2.0-19) 14.2.0", False),
        (b"GCC: (GNU) 9.1.0\0GCC: (GNU) 15.1.0", True),
        (b"clang version 18.1.3", False),
    ],
)
def test_amx_is_kept_out_where_the_compiler_broke_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comment: bytes, broken: bool
) -> None:
    library = tmp_path / "libggml-cpu.so"
    library.write_bytes(b"\x7fELF....\0" + comment + b"\0")
    monkeypatch.setattr(kernels, "system_info", lambda: "CPU : AVX2 = 1 | AMX_INT8 = 1 |")
    assert kernels.amx_is_broken(library) is broken
    monkeypatch.setattr(kernels, "system_info", lambda: "CPU : AVX2 = 1 |")
    assert not kernels.amx_is_broken(library)
    assert not kernels.amx_is_broken(None)


def test_what_the_processor_has_is_asked_once_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp builds its answer in one string for all: two who asked at once had it twice over (seen)."""
    asked: list[int] = []

    def told() -> bytes:
        asked.append(threading.get_ident())
        time.sleep(0.05)
        return b"CPU : AVX2 = 1 | " * len(asked)

    monkeypatch.setattr(kernels, "_info", [])
    monkeypatch.setattr(kernels.C, "llama_print_system_info", told)
    with ThreadPoolExecutor(4) as pool:
        heard = [each.result() for each in [pool.submit(kernels.system_info) for _ in range(8)]]
    assert set(heard) == {"CPU : AVX2 = 1 |"}
    assert len(asked) == 1


def test_hash_of_a_file_and_of_parts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(os.urandom(100_000))
    assert fingerprint.hash_file(path, lambda: None) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert fingerprint.hash_file(path, lambda: "remembered") == "remembered"
    assert model_files(path) == [path]
    parts = model_files(tmp_path / "big-00002-of-00003.gguf")
    assert [p.name for p in parts] == [f"big-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert fingerprint.combine(["a"]) == "a"
    assert fingerprint.combine(["a", "b"]) not in ("a", "b", fingerprint.combine(["b", "a"]))


class _Model:
    """Metadata only."""

    n_embd, n_ctx_train, n_swa, path = 576, 8192, 0, Path("/dev/null")

    def __init__(self, **meta: str) -> None:
        self._meta = {
            "block_count": "30", "attention.head_count": "9", "attention.head_count_kv": "3", **meta,
        }  # fmt: skip

    def meta(self, key: str) -> str | None:
        return self._meta.get(key.removeprefix("{arch}."))


def choose(model: Any = None, **changes: Any) -> capacity.Capacity:
    values = {"ctx": 0, "pool": 0, "memory": 1 << 30, "parallel": 4, "kv_type": "f16"}
    return capacity.choose(model or _Model(), **{**values, **changes})


def test_capacity() -> None:
    per_token = 30 * 3 * 128 * 2
    assert capacity.kv_bytes_per_token(_Model(), "f16", "f16") == per_token  # type: ignore[arg-type]
    assert capacity.kv_bytes_per_token(_Model(), "q8_0", "q8_0") == per_token * 8.5 / 16  # type: ignore[arg-type]
    assert capacity.kv_bytes_per_token(_Model(), "q8_0", "f16") == per_token * 12.25 / 16  # type: ignore[arg-type]
    assert choose(memory=per_token * 10_000, kv_type_v="f32").ctx == 6666  # three halves as large
    mixed = _Model(**{"attention.head_count_kv": "[3, 0, 3]", "attention.key_length": "32"})
    assert capacity.kv_bytes_per_token(mixed, "f32", "f32") == 6 * (32 + 64) * 4  # type: ignore[arg-type]
    assert choose() == capacity.Capacity(8192, 32768)
    assert choose(ctx=1000) == capacity.Capacity(1000, 3840)
    assert choose(ctx=1000, parallel=1) == capacity.Capacity(1000, 1024)
    assert choose(memory=per_token * 10_000) == capacity.Capacity(8192, 9984)
    assert choose(memory=per_token * 5000).ctx == 5000
    assert choose(memory=per_token * 5000, ctx=6000) == capacity.Capacity(6000, 6144)  # what was asked for
    assert choose(score_bytes=1) == capacity.Capacity(8192, 32512)  # not a multiple of 4096
    assert choose(score_bytes=1, parallel=1) == capacity.Capacity(8192, 8448)
    assert choose(memory=2 * per_token * 10_000, score_bytes=per_token) == capacity.Capacity(8192, 9984)
    assert choose(pool=3000) == capacity.Capacity(3000, 3072)
    with pytest.raises(ModelError, match=r"`model\.pool` is 512"):
        choose(pool=512, ctx=1024)
    with pytest.raises(ModelError, match=r"`model\.ctx` 900000000 needs .* GiB"):
        choose(ctx=900_000_000)


def test_long_rope_models_keep_their_short_factors(tmp_path: Path) -> None:
    model = _Model(**{"rope.scaling.original_context_length": "4096"})
    assert choose(model) == choose()  # no second set of factors in the file: nothing to choose
    model.path = tmp_path / "m"  # type: ignore[misc]
    model.path.write_bytes(b"GGUF..rope_factors_long.weight..")
    assert choose(model) == capacity.Capacity(4096, 4096)
    assert choose(model, ctx=2000).pool == 4096
    assert choose(model, ctx=6000) == capacity.Capacity(6000, 23808)  # asked for; rounded down
    silent = _Model()  # where the length is not said, it is that of the training
    silent.path = tmp_path / "m-00001-of-00002.gguf"  # type: ignore[misc]
    silent.path.write_bytes(b"GGUF")
    second = tmp_path / "m-00002-of-00002.gguf"
    second.write_bytes(b"GGUF")
    assert capacity.original_context(silent) == 0  # type: ignore[arg-type]
    second.write_bytes(bytes((1 << 20) - 9) + b"rope_factors_long.weight")
    assert capacity.original_context(silent) == 8192  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("top_p", float("inf")),
        ("repeat_penalty", 0.0),
        ("repeat_last_n", -2),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("samplers", ("zebra",)),
        ("dry_base", float("inf")),
    ],
)
def test_bad_sampling_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        check_sampling(Sampling(**{field: value}), 100)
    assert caught.value.param == field


def test_good_sampling_passes() -> None:
    check_sampling(Sampling(logit_bias={99: float("-inf")}, repeat_last_n=-1), 100)


def sequence(tokens: list[int]) -> Sequence:
    request = Request("r", tokens, 5, [], Sampling(), True, True, "", 0.0)
    return Sequence(request, list(tokens), TextStream([]))


def test_keys_of_a_sequence_are_the_chain_also_as_it_grows() -> None:
    tokens = list(range(200))
    grown = sequence(tokens[:70])
    root = Namespace(b"n" * 32)
    keys = chain(root, to_le(tokens))
    assert grown.key_before(0, root) == root
    assert grown.key_before(64, root) == keys[0]
    grown.tokens += tokens[70:]
    assert grown.key_before(192, root) == keys[2]
    assert grown.le() == to_le(tokens)
    assert grown.array().tolist() == tokens


def test_failures() -> None:
    frame = failure_of("r", BusyError("full", retry_after=3))
    assert (frame.error, frame.message, frame.code, frame.details) == (
        "BusyError",
        "full",
        "queue_full",
        {"retry_after": 3},
    )
    assert "llama_decode: -3 (why)" in failure_of("r", DecodeError(-3, "why")).message
    secret = failure_of("r", KeyError("a user's text"))
    assert "user" not in secret.message
    assert "KeyError" in secret.message
