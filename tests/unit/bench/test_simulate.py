"""The simulator: what it counts, that no policy beats the bound, and what ours does with prompts that come once."""

from __future__ import annotations

import gzip
import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.bench.evictors import BOUND, EVICTORS, OURS, SIMPLE
from homeprefixd.bench.simulate import Outcome, Prefill, simulate, unbounded_tokens, verdicts
from homeprefixd.bench.traces import read_trace
from homeprefixd.cli.main import run
from homeprefixd.cli.simulate import difference
from homeprefixd.errors import RequestError

Prompt = Sequence[int]


def write(path: Path, prompts: Sequence[Prompt], last: int = 512) -> Path:
    """A trace: a request each second, given by its ids; the last block has `last` tokens."""
    lines = [
        json.dumps({"timestamp": 1000 * n, "input_length": 512 * (len(ids) - 1) + last, "hash_ids": list(ids)})
        for n, ids in enumerate(prompts)
    ]
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write("\n".join(lines) + "\n")
    return path


def chats(requests: int, seed: int = 1) -> list[Prompt]:
    """Growing conversations over shared beginnings, among prompts that come once."""
    choose = random.Random(seed)
    fresh = iter(range(1000, 1_000_000))
    growing: list[list[int]] = []
    prompts: list[Prompt] = []
    while len(prompts) < requests:
        if choose.random() < 0.3:
            prompts.append([next(fresh) for _ in range(choose.randrange(1, 20))])
        elif growing and choose.random() < 0.7:
            chat = choose.choice(growing[-10:])
            chat += [next(fresh) for _ in range(choose.randrange(1, 4))]
            prompts.append(list(chat))
        else:
            house = choose.randrange(3) * 10
            growing.append([house + depth for depth in range(5)])
            prompts.append(list(growing[-1]))
    return prompts


def ratios(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {one.policy: one.hit_ratio for one in outcomes}


def test_what_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [[1, 2], [1, 3], [1, 2]], last=100)
    outcomes = simulate(path, budgets=(1.0,), blocks=(512,), prefill=Prefill(100.0, half=1 << 60))
    for one in outcomes:
        assert one.budget_tokens == 512 + 100 + 100
        assert one.hit_ratio == (512 + 612) / (3 * 612)
        assert one.seconds_saved == pytest.approx((512 + 612) / 100)
        assert one.seconds_total == pytest.approx(3 * 612 / 100)
        assert one.tokens_written == (612 if one.policy == BOUND else 712)


@pytest.mark.parametrize("block", [64, 128, 512, 1024])
def test_blocks_of_other_sizes(tmp_path: Path, block: int) -> None:
    path = write(tmp_path / "t.jsonl.gz", [[1, 2, 3], [1, 2, 4], [1, 2, 3]], last=100)
    trace = read_trace(path, block)
    assert [arrival.tokens for arrival in trace] == [1124] * 3
    assert {b.tokens for a in trace for b in a.blocks[:-1]} == {block}
    [one] = simulate(path, budgets=(1.0,), blocks=(block,), policies=(OURS,))
    assert one.hit_ratio == (1024 + 1124) / (3 * 1124)
    assert unbounded_tokens(trace) == one.budget_tokens == 1024 + 200


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [0.02, 0.1, 0.4])
def test_nobody_beats_the_bound(tmp_path: Path, seed: int, budget: float) -> None:
    path = write(tmp_path / "t.jsonl", chats(300, seed))
    found = ratios(simulate(path, budgets=(budget,), blocks=(512,)))
    assert set(found) == set(EVICTORS)
    assert all(0 < ratio <= found[BOUND] for ratio in found.values())
    assert found[OURS] > found["lru"] - 0.02


def test_with_room_for_all_nothing_is_lost(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", chats(200))
    found = ratios(simulate(path, budgets=(1.0,), blocks=(512,)))
    assert len(set(found.values())) == 1


def test_a_flood_of_prompts_that_come_once_passes_through(tmp_path: Path) -> None:
    """A camera's captions: the prompts that are used do not lose their place."""
    house, fresh = [1, 2, 3, 4, 5], iter(range(100, 1_000_000))
    prompts: list[Prompt] = [house] * 5
    for _ in range(20):
        prompts += [[next(fresh) for _ in range(10)] for _ in range(30)] + [house]
    path = write(tmp_path / "t.jsonl", prompts)
    budget = 60 / len({i for ids in prompts for i in ids})  # of 60 blocks; 300 pass between two uses
    found = {one.policy: one for one in simulate(path, budgets=(budget,), blocks=(512,))}
    most = 24 * 5 / sum(map(len, prompts))
    assert found[OURS].hit_ratio == most
    assert found["lru"].hit_ratio < most / 2


def test_the_verdict_names_the_best_simple_policy(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", chats(200))
    outcomes = simulate(path, budgets=(0.05, 0.5), blocks=(512,))
    for one in verdicts(outcomes):
        here = {o.policy: o.hit_ratio for o in outcomes if o.budget_share == one.budget_share}
        assert one.best_ratio == max(here[name] for name in SIMPLE) == here[one.best]
        assert one.behind == one.best_ratio - here[OURS]
        assert one.bound == here[BOUND]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "it is no JSON (column 2: "),
        ("[]", "it is no object of JSON"),
        ('{"timestamp": 0}', "input_length and hash_ids are missing"),
        ('{"timestamp": 0, "hash_ids": []}', "input_length is missing"),
        ('{"timestamp": 0, "input_length": 9, "hash_ids": []}', "0 hash_ids for an input_length of 9"),
        ('{"timestamp": 0, "input_length": 9, "hash_ids": 5}', "hash_ids is no list of whole numbers"),
        ('{"timestamp": 0, "input_length": 9, "hash_ids": ["a"]}', "hash_ids is no list of whole numbers"),
        ('{"timestamp": 0, "input_length": 9, "hash_ids": [true]}', "hash_ids is no list of whole numbers"),
        ('{"timestamp": 0, "input_length": 1024.7, "hash_ids": [1, 2, 3]}', "input_length is no whole number"),
        ('{"timestamp": null, "input_length": 9, "hash_ids": [1]}', "timestamp is no number"),
        ('{"timestamp": 0, "input_length": Infinity, "hash_ids": [1]}', "input_length is no number"),
        ("\x00", "it is no JSON"),
        ("[" * 100_000, "it is n"),
    ],
    ids=range(13),
)
def test_bad_traces(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "t.jsonl"
    good = '{"timestamp": 0, "input_length": 9, "hash_ids": [1]}'
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(RequestError) as caught:
        read_trace(path)
    assert caught.value.message.startswith(f"{path}:2: not a request of a trace: {why}")


def test_an_empty_trace(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(RequestError, match="no request is in it"):
        read_trace(tmp_path / "t.jsonl")


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.jsonl: cannot be read: No such file or directory$"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "t.gz").write_bytes(b"not compressed")
    with pytest.raises(RequestError, match=r"t\.gz: cannot be read: it is not what gzip writes$"):
        read_trace(tmp_path / "t.gz")
    whole = write(tmp_path / "u.gz", chats(50)).read_bytes()
    (tmp_path / "u.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match="it is cut short after line"):
        read_trace(tmp_path / "u.gz")
    (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="is no text in UTF-8"):
        read_trace(tmp_path / "t.jsonl")


class TestCommand:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> str:
        return str(write(tmp_path / "t.jsonl", chats(50)))

    def test_table_and_verdict(self, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["simulate", trace, "--budget", "10%"]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in EVICTORS)
        assert "the best simple policy" in out

    @pytest.mark.parametrize(
        ("behind", "said"),
        [
            (0.0, "0.00 points ahead of"),
            (0.004e-2, "0.00 points"),
            (0.01, "1.00 points behind"),
            (-0.02, "2.00 points ahead"),
        ],
    )
    def test_no_figure_is_minus_nothing(self, behind: float, said: str) -> None:
        assert difference(behind).startswith(said)
        assert "-" not in difference(behind)

    def test_json_and_page(self, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        html = tmp_path / "page.html"
        assert run(["simulate", trace, "--budget", "5%", "--budget", "50%", "--html", str(html), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert len(found["outcomes"]) == 2 * len(EVICTORS)
        assert len(found["verdicts"]) == 2
        assert all(one["bytes_written"] == one["tokens_written"] * 23_040 for one in found["outcomes"])
        root = ET.fromstring(html.read_text())
        assert len(root.findall(".//polyline")) == 2 * len(EVICTORS)
        assert "http" not in html.read_text()

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--budget", "10"], "--budget"),
            (["--budget", "0%"], "--budget"),
            (["--budget", "101%"], "--budget"),
            (["--policy", "best"], "clairvoyant"),
            (["--block", "100"], "100"),
            (["--html", "/nonexistent/page.html"], "/nonexistent"),
        ],
    )
    def test_bad_flags(self, trace: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["simulate", trace, *flags]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("name", list(EVICTORS))
def test_what_has_no_room_is_not_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t.jsonl"
    line = json.dumps({"timestamp": 0, "input_length": 512, "hash_ids": [1]})
    path.write_text(f"{line}\n" * 50)
    [found] = simulate(path, budgets=[0.5], blocks=[512], policies=[name])
    assert (found.hit_ratio, found.tokens_written) == (0, 0)
    [found] = simulate(path, budgets=[1.0], blocks=[512], policies=[name])
    assert (found.hit_ratio, found.tokens_written) == (49 / 50, 512)
