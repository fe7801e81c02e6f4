"""What the scenarios' figures are made of, and where targets come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from homeprefixd.bench.client import Reply
from homeprefixd.bench.passes import Passes, checked_phases, machine_facts
from homeprefixd.bench.scenarios import burst, common_rate, longest_pause
from homeprefixd.bench.targets import Target, Workplace, api_base
from homeprefixd.errors import ConfigError, UnavailableError
from tests.unit.bench.measured import FakeTarget, plan_of, session


def test_the_rate_while_all_streams_run() -> None:
    one = Reply(0.0, arrivals=[0.0, 1.0, 2.0, 3.0, 4.0])
    two = Reply(0.0, arrivals=[2.0, 2.5, 3.0, 3.5, 4.0, 4.5], usage={"completion_tokens": 12})
    assert common_rate([one, two]) == pytest.approx((2 + 4 * 2) / 2)
    assert common_rate([one]) == pytest.approx(1.0)
    with pytest.raises(UnavailableError, match="longer replies"):
        common_rate([one, Reply(0.0, arrivals=[5.0, 6.0])])


def test_the_longest_pause_reaches_over_the_ends() -> None:
    arrivals = [0.0, 1.0, 4.0, 5.0, 9.0]
    assert longest_pause(arrivals, 2.0, 4.5) == 3.0  # from 1 to 4
    assert longest_pause(arrivals, 4.2, 6.0) == 4.0  # from 5 to 9
    assert longest_pause([], 2.0, 7.0) == 5.0
    assert longest_pause([0.0, 1.0], 0.5, 9.0) == 8.0


async def test_burst_counts_what_was_computed(fake: FakeTarget) -> None:
    """The fake computes 60 of 100 tokens each time: 240. The least is 100, as no prompt is longer than another."""
    (row,) = await burst(fake, requests=4, prefix=100, rounds=2, say=lambda _text: None)
    assert row.value == pytest.approx(2.4)
    assert len(fake.asked) == 10
    assert len({body["messages"][0]["content"] for _, body in fake.asked}) == 2
    assert len({body["messages"][1]["content"] for _, body in fake.asked[:4]}) == 4


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("localhost:8080", "http://localhost:8080/v1"),
        ("http://a.example:1/", "http://a.example:1/v1"),
        ("https://a.example/v1/", "https://a.example/v1"),
        ("https://a.example/api/openai?x=1", "https://a.example/api/openai"),
    ],
)
def test_urls(given: str, base: str) -> None:
    assert api_base(given) == base


def test_no_url() -> None:
    with pytest.raises(ConfigError, match="no URL"):
        api_base("ftp://a.example")


def test_phases() -> None:
    with Workplace() as place:
        ours = place.ours("model.gguf", ctx=512, threads=1, parallel=1)
        url = place.url("localhost:1")
        assert checked_phases("hot, cold", [ours, url]) == ("cold", "hot")
        assert checked_phases("off", [ours]) == ("off",)
        for text, targets, message in (
            ("warm", [ours], "no phase 'warm'"),
            ("", [ours], "empty"),
            ("hot", [ours], "name cold too"),
            ("restart,off", [ours], "name cold too"),
            ("cold,restart", [url], "cannot be restarted"),
        ):
            with pytest.raises(ConfigError, match=message):
                checked_phases(text, targets)


def test_a_workplace_leaves_nothing(tmp_path: Path) -> None:
    with Workplace(tmp_path) as place:
        place.ours("model.gguf", ctx=512, threads=1, parallel=1)
        assert list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="no directory"):
        Workplace(tmp_path / "nowhere")


def passes(target: Target | None, **more: object) -> Passes:
    targets = [] if target is None else [target]
    quiet = {"say": lambda _: None, "progress": lambda _: None}
    return Passes(targets, plan_of(session(0.0)), ["cold"], **{**quiet, **more})  # type: ignore[arg-type]


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="--serve, --llama-server PATH or --url"):
        passes(None)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        passes(FakeTarget(), restart_at=1.5)
    with pytest.raises(ConfigError, match="cannot be restarted"):
        passes(FakeTarget(), restart_at=0.5)


def test_a_url_where_nothing_answers() -> None:
    with Workplace() as place:
        one = passes(place.url("http://127.0.0.1:9"))
        with pytest.raises(UnavailableError, match=r"nothing answers at http://127\.0\.0\.1:9/v1/models"):
            one.run()
    assert one.runs == []


def test_facts() -> None:
    facts = machine_facts(model="m")
    assert facts["cores"] >= 1
    assert facts["model"] == "m"
