"""SIGHUP: what is changed while the daemon runs, what is named in the log, and what a broken file does: nothing."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from homeprefixd.config import AppRulesConfig, CacheConfig, Config, LogConfig, ModelConfig, StableConfig
from homeprefixd.errors import ConfigError, UnavailableError
from homeprefixd.frames.store import Resize, Resized
from homeprefixd.frames.worker import StableRules
from homeprefixd.models.store_link import StoreSettings
from homeprefixd.reload import CurrentSettings, Reloader, differences

MIB = 1 << 20
OLD = Config(cache=CacheConfig(warm=100 * MIB, hot=50 * MIB))


class Store:
    def __init__(self) -> None:
        self.asked: list[Resize] = []
        self.away = False

    async def resize(self, request: Resize) -> Resized:
        if self.away:
            raise UnavailableError("the cache's store is away")
        self.asked.append(request)
        return Resized(0, min(request.warm, 110 * MIB), min(request.hot, 50 * MIB))


class Pool:
    level = ""
    rules: StableRules | None = None

    def set_rules(self, rules: StableRules) -> None:
        self.rules = rules

    def set_log_level(self, level: str) -> None:
        self.level = level


def settings_of(config: Config) -> StoreSettings:
    cache = config.cache
    return StoreSettings(
        Path("/cache"), cache.hot or 7 * MIB, cache.warm or 9 * MIB, 1, 2.0, MIB, config.log.level,
        daily_writes=cache.daily_writes, scrub_rate=cache.scrub_rate,
    )  # fmt: skip


class Scene:
    def __init__(self) -> None:
        self.new: Config | Exception = OLD
        self.store, self.pool = Store(), Pool()
        self.settings = CurrentSettings(settings_of(OLD))
        store: Any = self.store
        pool: Any = self.pool
        self.reloader = Reloader(OLD, self.load, settings_of, self.settings, store, pool)

    def load(self) -> Config:
        if isinstance(self.new, Exception):
            raise self.new
        return self.new

    async def reload(self, new: Config | Exception) -> list[Resize]:
        self.new = new
        self.store.asked.clear()
        await self.reloader.reload()
        return self.store.asked


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Scene:
    caplog.set_level(logging.INFO)
    return Scene()


def with_cache(**changes: Any) -> Config:
    return msgspec.structs.replace(OLD, cache=msgspec.structs.replace(OLD.cache, **changes))


async def test_only_what_has_changed_is_told(scene: Scene) -> None:
    assert await scene.reload(with_cache(warm=60 * MIB)) == [Resize(0, 60 * MIB)]
    assert scene.settings.value == dataclasses.replace(
        settings_of(OLD), warm=60 * MIB, warm_most=100 * MIB, hot_most=50 * MIB
    )
    assert await scene.reload(with_cache(warm=60 * MIB, daily_writes=5)) == [Resize(0, 0, daily_writes=5)]
    assert await scene.reload(with_cache(warm=60 * MIB, daily_writes=0, scrub_rate=0)) == [
        Resize(0, 0, daily_writes=0, scrub_rate=0)
    ]
    assert await scene.reload(with_cache(warm=60 * MIB, scrub_rate=0)) == []
    assert "--warm" in scene.settings.command(3)
    assert str(60 * MIB) in scene.settings.command(3)


async def test_what_cannot_change_is_named(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    new = msgspec.structs.replace(with_cache(compression=5, hot=20 * MIB), model=ModelConfig(ctx=4096))
    assert await scene.reload(new) == [Resize(0, 0, hot=20 * MIB)]
    [said] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "model.ctx" in said
    assert "cache.compression" in said
    assert "cache.hot" not in said
    assert scene.settings.value.compression == 1


async def test_more_than_there_can_be_now(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    await scene.reload(with_cache(warm=1000 * MIB, hot=500 * MIB))
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert any("cache.warm: 110 MiB until the next start, then 1000 MiB" in line for line in said)
    assert any("cache.hot: 50.0 MiB until the next start, then 500 MiB" in line for line in said)


async def test_sizes_are_said_in_words(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    await scene.reload(with_cache(hot=0, warm=3 << 30, daily_writes=1_500_000_000, scrub_rate=0))
    said = [record.message for record in caplog.records]
    assert "cache.hot is auto now, it was 50.0 MiB" in said
    assert "cache.warm is 3.0 GiB now, it was 100 MiB" in said
    assert "cache.daily_writes is 1.4 GiB now, it was without a bound" in said
    assert "cache.scrub_rate is off now, it was 8.0 MiB a second" in said
    caplog.clear()
    await scene.reload(with_cache(hot=50 * MIB + 2000, warm=100 * MIB))  # the store takes whole pages of it
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == []


async def test_the_level_of_the_log(scene: Scene) -> None:
    root = logging.getLogger()
    before = root.level
    try:
        asked = await scene.reload(msgspec.structs.replace(OLD, log=LogConfig("debug")))
        assert asked == [Resize(0, 0, log_level="debug")]
        assert (root.level, scene.pool.level) == (logging.DEBUG, "debug")
    finally:
        root.setLevel(before)


async def test_a_broken_file_changes_nothing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    assert await scene.reload(ConfigError("config.toml:3: there is no setting cache.worm")) == []
    assert "the old one stays: config.toml:3: there is no setting cache.worm" in caplog.text
    assert scene.settings.value == settings_of(OLD)
    assert await scene.reload(with_cache(warm=60 * MIB)) == [Resize(0, 60 * MIB)]


async def test_a_store_that_is_away_is_started_with_it(scene: Scene) -> None:
    scene.store.away = True
    await scene.reload(with_cache(warm=60 * MIB))
    assert scene.settings.value.warm == 60 * MIB


async def test_a_store_that_is_started_with_less_may_have_as_much_again(scene: Scene) -> None:
    for size in (60, 130, 20):
        await scene.reload(with_cache(warm=size * MIB, hot=size * MIB // 2))
    now = scene.settings.value
    assert (now.warm, now.warm_most, now.hot, now.hot_most) == (20 * MIB, 130 * MIB, 10 * MIB, 65 * MIB)


async def test_sizes_left_to_the_machine(scene: Scene) -> None:
    """They are chosen anew only if the setting has changed."""
    assert await scene.reload(with_cache(warm=0)) == [Resize(0, 9 * MIB)]
    assert await scene.reload(with_cache(warm=0)) == []


def test_differences() -> None:
    assert differences(OLD, OLD) == {}
    assert differences(OLD, with_cache(warm=1)) == {"cache.warm": (100 * MIB, 1)}


async def test_rules_count_at_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    new = msgspec.structs.replace(OLD, stable=StableConfig(sort_tools="on", move="^Step"))
    assert await scene.reload(new) == []
    assert scene.pool.rules == StableRules(sort_tools=True, move="^Step")
    assert "next start" not in caplog.text
    scene.pool.rules = None
    await scene.reload(new)  # nothing has changed, but what was too slow is to be tried again
    assert scene.pool.rules == StableRules(sort_tools=True, move="^Step")


async def test_a_rule_that_is_not_written_is_used_until_the_daemon_ends(scene: Scene) -> None:
    assert scene.reloader.use_rule("sort_keys", "on")
    assert scene.reloader.use_rule("sort_keys", "on")  # still not written
    assert scene.reloader.use_rule("move", "^Step")
    assert scene.reloader.use_rule("move", "^Mood")
    assert scene.pool.rules == StableRules(sort_keys=True, move="^Step|^Mood")
    await scene.reload(OLD)
    assert scene.pool.rules == StableRules(sort_keys=True, move="^Step|^Mood")
    written = StableConfig(sort_tools="on", move="^Room|^Step", sort_keys="on")
    await scene.reload(msgspec.structs.replace(OLD, stable=written))
    assert scene.pool.rules == StableRules(sort_keys=True, sort_tools=True, move="^Room|^Step|^Mood")
    assert not scene.reloader.use_rule("sort_keys", "on")
    await scene.reload(OLD)  # what was written is the file's affair
    assert scene.pool.rules == StableRules(move="^Mood")


async def test_a_rule_is_in_force_whatever_the_file_is(scene: Scene, tmp_path: Path) -> None:
    def broken() -> Path:
        raise ConfigError("c.toml: there is no setting model.x")

    done = await scene.reloader.apply_rule("move_volatile_line", "on", "First", broken)
    assert done.file == ""
    assert "there is no setting model.x. Mend that, then add these lines" in done.reason
    assert scene.pool.rules is not None
    assert [one.app for one in scene.pool.rules.per_app] == ["First"]
    scene.new = msgspec.structs.replace(
        OLD, stable=StableConfig(per_app=[AppRulesConfig("Second", move_volatile_line="on")])
    )
    file = tmp_path / "c.toml"
    done = await scene.reloader.apply_rule("move_volatile_line", "on", "Second", lambda: file)
    assert done == (str(file), "")
    assert 'app = "Second"' in file.read_text()
    assert sorted(one.app for one in scene.pool.rules.per_app) == ["First", "Second"]


async def test_one_apps_rule_that_is_written_ends_no_other_ones(scene: Scene) -> None:
    assert scene.reloader.use_rule("move_volatile_line", "on", "First")
    written = StableConfig(per_app=[AppRulesConfig("Second", move_volatile_line="on")])
    await scene.reload(msgspec.structs.replace(OLD, stable=written))
    assert not scene.reloader.use_rule("move_volatile_line", "on", "Second")
    assert scene.pool.rules is not None
    rules = {one.app: one.move_volatile_line for one in scene.pool.rules.per_app}
    assert rules == {"First": True, "Second": True}
