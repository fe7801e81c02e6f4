"""Plans: the same for every target, on every machine, and as long and as dense as they were asked to be."""

from __future__ import annotations

import itertools
from statistics import mean

import pytest

from homeprefixd.bench.household import estimate_tokens
from homeprefixd.bench.workloads import APPS, HOUSEHOLD, WORKLOADS, Knobs, Session, arrivals, plan
from homeprefixd.errors import ConfigError


def text(session: Session) -> str:
    return "\n".join(message["content"] for turn in session.turns for message in turn.messages)


def tokens(session: Session) -> float:
    return sum(estimate_tokens(line) for line in text(session).splitlines())


def test_the_same_on_every_machine() -> None:
    """Published figures name this digest."""
    assert plan(HOUSEHOLD, duration=600).digest() == "43ae9b1a232b6ce1"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_same_twice_and_different_for_another_seed(workload: str) -> None:
    one, two, other = (plan(workload, duration=120, seed=seed) for seed in (3, 3, 4))
    assert one == two
    assert one.digest() == two.digest() != other.digest()
    assert [s.start for s in one.sessions] != [s.start for s in other.sessions]


def test_a_longer_plan_only_appends() -> None:
    short, long = plan(HOUSEHOLD, duration=60), plan(HOUSEHOLD, duration=240)
    assert [session for session in long.sessions if session.start < 60] == list(short.sessions)


def test_one_app_alone_asks_what_it_asks_in_the_house() -> None:
    house = plan(HOUSEHOLD, duration=120)
    for name in APPS:
        alone = plan(name, duration=120)
        assert alone.apps == (name,)
        assert alone.sessions == tuple(session for session in house.sessions if session.app == name)


def test_all_six_ask_within_a_minute() -> None:
    for seed in range(5):
        assert set(plan(HOUSEHOLD, duration=60, seed=seed).apps) == set(APPS)


def test_sessions_are_in_order_and_inside_the_duration() -> None:
    starts = [session.start for session in plan(HOUSEHOLD, duration=300).sessions]
    assert starts == sorted(starts)
    assert starts[0] >= 0
    assert starts[-1] < 300


@pytest.mark.parametrize(
    ("app", "least", "most"),
    [("voice", 1900, 2400), ("chat", 250, 1500), ("documents", 1300, 4000), ("camera", 60, 160), ("titles", 280, 480)],
)
def test_sizes(app: str, least: int, most: int) -> None:
    for session in plan(app, duration=600).sessions:
        assert least < tokens(session) < most


def test_an_agents_task_grows() -> None:
    for session in plan("agent", duration=600).sessions:
        first = sum(estimate_tokens(line) for m in session.turns[0].messages for line in m["content"].splitlines())
        assert 3300 < first < 4600
        assert 5000 < tokens(session) + sum(turn.max_tokens for turn in session.turns) < 7200
        assert 9 <= len(session.turns) <= 12


def test_what_is_shared_and_what_is_not() -> None:
    voice = plan("voice", duration=300).sessions
    systems = {session.turns[0].messages[0]["content"] for session in voice}
    assert len(systems) == 1
    assert len({session.turns[0].messages[1]["content"] for session in voice}) > len(voice) * 0.8
    documents = plan("documents", duration=900).sessions
    papers = [session.turns[0].messages[1]["content"].split("\n\n")[0] for session in documents]
    assert 2 <= len(set(papers)) <= 4 < len(papers)
    title, tags = plan("titles", duration=60).sessions[:2]
    history = text(title).split("<chat_history>")[1]
    assert history == text(tags).split("<chat_history>")[1]
    assert 0 < tags.start - title.start < 0.5
    assert plan("titles", duration=(title.start + tags.start) / 2).sessions == (title,)


def test_only_the_first_turn_comes_without_thinking() -> None:
    for session in plan("chat", duration=600).sessions:
        assert session.turns[0].think == 0
        assert all(turn.think > 0 for turn in session.turns[1:])
        assert [m["role"] for m in session.turns[0].messages] == ["system", "user"]
        assert all([m["role"] for m in turn.messages] == ["user"] for turn in session.turns[1:])


def test_scale_makes_prompts_and_replies_shorter() -> None:
    whole, half = (plan("voice", duration=60, scale=scale).sessions[0] for scale in (1.0, 0.5))
    assert 0.4 < tokens(half) / tokens(whole) < 0.6
    assert 0.4 < half.turns[0].max_tokens / whole.turns[0].max_tokens < 0.6
    assert plan("camera", duration=20, scale=0.001).sessions[0].turns[0].max_tokens == 4


def test_rate_makes_more_requests_and_less_thinking() -> None:
    one, double = plan(HOUSEHOLD, duration=1200), plan(HOUSEHOLD, duration=1200, rate=2.0)
    assert 1.6 < len(double.sessions) / len(one.sessions) < 2.4
    slow, fast = (next(s for s in p.sessions if s.app == "chat") for p in (one, double))
    assert fast.turns[1].think == pytest.approx(slow.turns[1].think / 2)
    assert fast.turns[1].messages == slow.turns[1].messages


def test_arrivals_are_fixed_or_exponential() -> None:
    for app in APPS.values():
        times = list(itertools.islice(arrivals(app, Knobs(7, 1.0, 1.0)), 2000))
        gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
        assert times[0] <= min(app.interval / 4, 8.0)
        assert mean(gaps) == pytest.approx(app.interval, rel=0.1)
        if app.fixed:
            assert max(gaps) - min(gaps) < 1e-6
        else:  # of an exponential distribution, 63 % lie below the mean, and 5 % beyond three times the mean
            assert sum(gap < app.interval for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.05)
            assert sum(gap > 3 * app.interval for gap in gaps) / len(gaps) == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize("knob", [{"duration": 0}, {"rate": -1}, {"scale": float("nan")}])
def test_wrong_knobs(knob: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(knob))} must be a number above 0"):
        plan("voice", **{"duration": 10, **knob})


def test_an_unknown_workload() -> None:
    with pytest.raises(ConfigError, match=r"no workload 'kitchen'.*voice, chat.*household"):
        plan("kitchen", duration=10)
