"""SIGHUP: the configuration is read again, and what can change while the daemon runs is changed.

What cannot is named in the log and waits for the next start. A configuration that is refused changes nothing: the log
says why, the old one stays.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from .config import Config
from .config_file import Applied, apply_rule, by_hand, with_rule
from .errors import ConfigError, HomeprefixdError
from .frames.store import Resize
from .models.loading import stable_rules
from .models.pool import Pool
from .models.store_link import StoreLink, StoreSettings
from .sizes import size_text

logger = logging.getLogger(__name__)

_AT_RUN_TIME = ("cache.warm", "cache.hot", "cache.daily_writes", "cache.scrub_rate", "log.level")
_RULES = "stable."  # settings of prompts' rules: all at run time


class CurrentSettings:
    """What the store is started with, at its first start and after a crash: changed by a reload.

    A store that is started with less than there was before can have as much again.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self.value = settings

    def change(self, given: Mapping[str, Any]) -> None:
        """`given`: fields of StoreSettings."""
        old = self.value
        hot_most, warm_most = max(old.hot, old.hot_most), max(old.warm, old.warm_most)
        self.value = dataclasses.replace(old, hot_most=hot_most, warm_most=warm_most, **given)

    def command(self, descriptor: int) -> list[str]:
        """As `StoreSettings.command`."""
        return self.value.command(descriptor)


class Reloader:
    """Belongs to the event loop. `load`: reads the configuration anew, raises HomeprefixdError.

    `resolve`: the store's settings by a configuration, where sizes that are left to the machine are chosen.
    """

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config],
        resolve: Callable[[Config], StoreSettings],
        settings: CurrentSettings,
        store: StoreLink,
        pool: Pool,
    ) -> None:
        self._config = config
        self._unwritten: list[tuple[str, str, str]] = []  # rules, settings and apps that no source of settings has
        self._load = load
        self._resolve = resolve
        self._settings = settings
        self._store = store
        self._pool = pool

    async def reload(self) -> None:
        """Read, and change what can be. Never raises."""
        try:
            new = self._with_unwritten(self._load())
            changed = differences(self._config, new)
            if not any(name.startswith(_RULES) for name in changed):
                self._pool.set_rules(stable_rules(self._config.stable))  # those that were too slow are tried again
            if not changed:
                logger.info("the configuration was read again: nothing in it has changed")
                return
            await self._apply(new, changed)
        except HomeprefixdError as error:
            logger.error("the configuration cannot be used, the old one stays: %s", error.message)
        except Exception:
            logger.exception("the configuration could not be read again, the old one stays")

    async def apply_rule(self, rule: str, setting: str, app: str, settings_file: Callable[[], Path | None]) -> Applied:
        """Put a rule of `[stable]` in force, and write it into the configuration file if that may be written.

        `settings_file`: the one in use, or the user's own; may raise ConfigError.
        """
        written, reason = "", "there is no configuration file, and no home for one"
        try:
            file = await asyncio.to_thread(settings_file)
        except ConfigError as error:  # what was fit at the start is not any more
            file, reason = None, f"{error.message}. Mend that, then {by_hand(rule, setting, app)}"
        if file is not None:
            try:
                written = await asyncio.to_thread(apply_rule, rule, file, setting, app=app)
                reason = ""
            except ConfigError as error:
                reason = error.message
        if written:
            await self.reload()
        if self.use_rule(rule, setting, app) and written:
            written, reason = "", f"{written} has it now, but something else that says otherwise wins"
        return Applied(written, reason)

    def use_rule(self, rule: str, setting: str, app: str = "") -> bool:
        """Set a rule of `[stable]`, for one app or ("") for all; whether the configuration as it was read last says
        otherwise, so that it is in force until the daemon ends only.
        """
        asked = (rule, setting, app)
        if asked in self._unwritten:
            return True
        new = _with_rule(self._config, *asked)
        if new == self._config:
            return False
        self._unwritten.append(asked)
        self._config = new
        self._pool.set_rules(stable_rules(new.stable))
        logger.info("%s%s is %s now%s", _RULES, rule, setting, f" for {app}" if app else "")
        return True

    def _with_unwritten(self, read: Config) -> Config:
        """A configuration with the rules that it lacks though they are in force: who was told that they are until the
        daemon ends has not asked for another one's rule, nor for a reload.
        """
        self._unwritten = [one for one in self._unwritten if _with_rule(read, *one) != read]
        for one in self._unwritten:
            read = _with_rule(read, *one)
        return read

    async def _apply(self, new: Config, changed: Mapping[str, tuple[Any, Any]]) -> None:
        waiting = [name for name in changed if name not in _AT_RUN_TIME and not name.startswith(_RULES)]
        if waiting:
            logger.warning("these settings have changed and count from the next start: %s", ", ".join(waiting))
        rules = [name for name in changed if name.startswith(_RULES)]
        if rules:
            self._config = _with(self._config, new, rules)
            self._pool.set_rules(stable_rules(self._config.stable))
            for name in rules:
                logger.info("%s is %s now, it was %s", name, changed[name][1], changed[name][0])
        now = [name for name in changed if name in _AT_RUN_TIME]
        if not now:
            return
        wanted = self._resolve(new)
        fields = {"cache.warm": "warm", "cache.hot": "hot", "cache.daily_writes": "daily_writes"}
        fields |= {"cache.scrub_rate": "scrub_rate", "log.level": "log_level"}
        given = {fields[name]: getattr(wanted, fields[name]) for name in now}
        self._settings.change(given)
        self._config = _with(self._config, new, now)
        for name in now:
            old, value = changed[name]
            logger.info("%s is %s now, it was %s", name, _said(name, value), _said(name, old))
        if "log.level" in now:
            logging.getLogger().setLevel(new.log.level.upper())
            self._pool.set_log_level(new.log.level)
        try:
            done = await self._store.resize(Resize(0, **{"warm": 0, **given}))
        except HomeprefixdError as error:  # it is started with them
            logger.warning("the store takes the new settings when it starts again: %s", error.message)
            return
        for name, asked, got in (
            ("cache.warm", given.get("warm"), done.warm),
            ("cache.hot", given.get("hot"), done.hot),
        ):
            if asked is not None and got < asked and size_text(got) != size_text(asked):  # not: whole pages of it
                logger.warning("%s: %s until the next start, then %s", name, size_text(got), size_text(asked))


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, by path: before and after."""
    before, after = _flat(old), _flat(new)
    return {name: (before[name], value) for name, value in after.items() if before[name] != value}


_ZERO = {"cache.warm": "auto", "cache.hot": "auto", "cache.daily_writes": "without a bound", "cache.scrub_rate": "off"}
"""Sizes, and what 0 means for them."""


def _said(name: str, value: Any) -> str:
    """A setting's value for the log: sizes in words."""
    if name not in _ZERO:
        return str(value)
    if not value:
        return _ZERO[name]
    return f"{size_text(value)} a second" if name == "cache.scrub_rate" else size_text(value)


def _with_rule(config: Config, rule: str, setting: str, app: str) -> Config:
    tree: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    return msgspec.convert({**tree, "stable": with_rule(tree["stable"], rule, setting, app)}, Config)


def _with(config: Config, new: Config, names: Iterable[str]) -> Config:
    """`config`, but for the settings `names`, which are those of `new`."""
    tree: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    for name in names:
        section, _, setting = name.partition(".")
        tree[section][setting] = getattr(getattr(new, section), setting)
    return msgspec.convert(tree, Config)


def _flat(config: Config) -> dict[str, Any]:
    tree: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    return {f"{section}.{name}": value for section, settings in tree.items() for name, value in settings.items()}


def has_terminal() -> bool:
    """Whether this process hangs on a terminal. It does not any more once that was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
