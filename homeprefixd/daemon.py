"""The composition root of the daemon: builds things, starts and stops them in order.

Start: what the configuration names is checked, the port is bound, the store starts, the HTTP server listens, then the
workers load. Stop: no new requests, running ones get their time, workers end, the store writes what waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from . import budgets, listen, logs, machine
from .api.keyring import KeyRing, ring_of, secret_in
from .config import Config, RecordsConfig, ServerConfig
from .config_file import Applied
from .config_sources import OWNER_FD, cache_directory
from .daemon_file import DaemonFile
from .errors import ConfigError, StoreError, UnavailableError
from .last_loads import LastLoads
from .models.catalog import Catalog
from .models.loading import load_frame, worker_command
from .models.pool import Pool
from .models.store_link import StoreLink
from .models.worker_link import Limits
from .reload import CurrentSettings, Reloader, has_terminal
from .systemd import Systemd

if TYPE_CHECKING:
    import ssl

    from aiohttp import web

    from .models.backend import Backend, CacheAdmin

STORE_PATIENCE = 10.0
"""Seconds that the start waits for the store to answer; then the daemon serves without it until it does."""

FLUSH_GRACE = 60.0
"""Seconds that the store gets at a stop to write what waits."""

HANDLERS_GRACE = 2.0
"""Seconds that HTTP handlers get to say goodbye once their requests have ended."""

DESCRIPTORS = 8192
"""Descriptors that the daemon asks for."""

WATCHDOG_SLACK = 60.0
"""Seconds beyond the limit at which the pool itself would have killed a silent worker."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DaemonState:
    """What the daemon is doing, for whoever shows it. Several calls with the same phase come as `progress` grows."""

    phase: Literal["starting", "loading", "ready", "stopping"]
    message: str  # one line for a person
    progress: float = 0.0  # of loading the model, 0 to 1
    url: str = ""  # base URL, e.g. "http://127.0.0.1:8080"; "" until the server listens


StateCallback = Callable[[DaemonState], None]
CreateApp = Callable[["Backend", "CacheAdmin", ServerConfig, KeyRing], "web.Application"]


def run(
    config: Config,
    *,
    on_state: StateCallback | None = None,
    log: TextIO | None = None,
    load: Callable[[], Config] | None = None,
    settings_file: Callable[[], Path | None] = lambda: None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises HomeprefixdError (its `exit_code`) if it cannot start.

    `log`: where log lines go; stderr if it is not given. `load`: reads the configuration again at SIGHUP; without it
    SIGHUP is as SIGTERM. `settings_file`: where rules that are applied are kept.
    """
    logs.configure_logging(config.log.level, os.environ, log or sys.stderr)
    raise_descriptor_limit()
    return asyncio.run(Daemon(config, os.environ, on_state=on_state, load=load, settings_file=settings_file).serve())


def raise_descriptor_limit() -> None:
    """Clients may have as many connections as the system allows us, not as many as shells are given by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _keys_text(count: int) -> str:
    return f"{count or 'no'} API {'key' if count == 1 else 'keys'}"


def _create_app(
    backend: Backend,
    admin: CacheAdmin,
    server: ServerConfig,
    keys: KeyRing,
    recording: RecordsConfig | None = None,
    directory: Path | None = None,
) -> web.Application:
    """`directory`: where the day's figures are kept, and what models were when they were loaded; None: nowhere."""
    from .api.app import create_app  # late: the store starts while this is imported
    from .api.figures_file import FIGURES_FILE, FiguresFile
    from .api.keys import LAST_LOADS
    from .api.record_file import recorded

    def path_of(model: str) -> str:
        return next((known.path for known in backend.known() if known.alias == model), "")

    figures = None if directory is None else FiguresFile(directory / FIGURES_FILE)
    name = socket.gethostname()
    kept = recorded(recording, figures, path_of)
    app = create_app(backend, admin, server, hosts=(name, f"{name}.local"), keys=keys, records=kept)
    if directory is not None:
        app[LAST_LOADS] = LastLoads(directory)
    return app


class Daemon:
    """One run of the daemon: `serve` once."""

    def __init__(
        self,
        config: Config,
        environ: MutableMapping[str, str],
        *,
        on_state: StateCallback | None = None,
        create_app: CreateApp | None = None,
        store_command: Callable[[int], list[str]] | None = None,
        worker_command: Callable[[int], list[str]] | None = None,
        limits: Limits | None = None,
        load: Callable[[], Config] | None = None,
        settings_file: Callable[[], Path | None] = lambda: None,
    ) -> None:
        """`environ`: systemd's variables are taken out of it. Commands not given are those of the real processes.

        `load`: reads the configuration again. `settings_file`: where rules that are applied are kept.
        """
        self._load = load
        self._settings_file = settings_file
        self._had_terminal = has_terminal()
        self._reloader: Reloader | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._config = config
        self._environ = environ
        self._on_state = on_state or (lambda state: None)
        self._create_app = create_app
        self._store_command = store_command
        self._worker_command = worker_command
        self._limits = limits or Limits()
        self._systemd = Systemd(environ)
        self._told: DaemonState | None = None
        self._url = ""
        self._addresses = ""  # for people, where `_url` is for programs on this machine
        self._draining = False
        self._was_ready = False
        self._stop = asyncio.Event()
        self._sockets: list[socket.socket] = []
        self._keys = KeyRing()
        self._tls: ssl.SSLContext | None = None
        self._file: DaemonFile | None = None
        self._store: StoreLink | None = None
        self._pool: Pool | None = None
        self._runner: web.AppRunner | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._file_keeper: asyncio.Task[None] | None = None

    async def serve(self) -> int:
        """Start, serve until a signal or `stop`, stop; 0. Raises HomeprefixdError if it cannot start."""
        loop = asyncio.get_running_loop()
        stop = asyncio.create_task(self._stop.wait())
        life = asyncio.create_task(self._live())
        loop.set_exception_handler(logs.Throttle(logs.EXCEPTION_EVERY))
        handled = self._handle_signals(loop)
        owner: int | None = None
        try:
            owner = self._watch_owner(loop)
            await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
        finally:
            for task in (life, stop):
                task.cancel()
            await asyncio.gather(life, stop, return_exceptions=True)
            await self._end()
            for number in handled:
                loop.remove_signal_handler(number)
            if owner is not None:
                loop.remove_reader(owner)
        return 0

    def stop(self) -> None:
        """As the first SIGTERM."""
        self._stop.set()

    # ------------------------------------------------------------------------------------------------- start

    async def _live(self) -> None:
        """Start everything and go on until cancelled."""
        config = self._config
        self._say(DaemonState("starting", "starting"))
        catalog = Catalog.from_config(config.model, config.models)
        directory = cache_directory(config.cache.dir, self._environ)
        credentials = self._environ.get("CREDENTIALS_DIRECTORY")
        self._keys = ring_of(config.server.keys_file, credentials, lambda: secret_in(directory))
        self._tls = listen.tls(config.server)
        self._sockets = self._systemd.take_sockets() or listen.bind(config.server)
        listen.check_exposure(self._sockets, config.server, has_keys=bool(self._keys))
        spare = budgets.spare_memory(catalog, config.models.memory)
        try:
            settings = budgets.store_settings(config.cache, directory, config.log.level, spare)
            for line in budgets.warnings(config.cache, directory, budgets.size_on_disk(directory)):
                logger.warning("%s", line)
        except OSError as error:
            raise StoreError(f"{directory}: the cache cannot be kept here: {error.strerror or error}") from error
        budget = budgets.model_budget(config.models, settings.hot)
        current = CurrentSettings(settings)
        self._store = store = StoreLink(
            self._store_command or current.command,
            self._environ,
            models=[spec.alias for spec in catalog.specs],
            shares={spec.alias: spec.settings.cache_share for spec in catalog.specs if spec.settings.cache_share},
            key_shares=self._keys.shares(),
        )
        self._pool = pool = Pool(
            catalog,
            lambda spec: load_frame(
                spec, config, cores=machine.physical_cores(), memory=budget.pool(spec), probes=str(directory)
            ),
            self._worker_command or worker_command(config.log.level),
            self._environ,
            store,
            budget=budget,
            limits=self._limits,
            changed=self._show,
        )
        if self._load is not None:
            self._reloader = Reloader(
                config,
                self._load,
                lambda new: budgets.store_settings(new.cache, directory, new.log.level, spare),
                current,
                store,
                pool,
            )
        await store.launch()
        create = self._create_app or functools.partial(_create_app, recording=config.records, directory=directory)
        app = create(pool, store, config.server, self._keys)  # imports much, while the store starts
        if self._reloader is not None:
            from .api.keys import APPLY_RULE

            app[APPLY_RULE] = self._apply_rule
        if not await store.answers(STORE_PATIENCE):
            logger.error("the store does not answer yet (%s): serving without it", store.status()["reason"])
        await self._listen(app)
        pool.start()
        certificate = "" if self._tls is None else config.server.tls_cert
        self._file = DaemonFile(directory, self._url, certificate)
        self._file.write()
        self._file_keeper = asyncio.create_task(self._file.keep())
        self._systemd.notify(READY="1", STATUS=f"serving at {self._addresses}")
        self._watchdog = asyncio.create_task(self._feed_watchdog())
        asked = _keys_text(len(self._keys))
        logger.info("listening at %s, %s, cache in %s", self._addresses, asked, directory)
        self._show()
        await pool.first_loads()
        gc.freeze()  # what is there now stays: no collection walks it
        await asyncio.Event().wait()

    async def _listen(self, app: web.Application) -> None:
        from aiohttp import web

        from .api.connection import Crowd, Site

        app.on_response_prepare.append(self._close_while_draining)
        access = logging.getLogger("homeprefixd.access") if self._config.log.level == "debug" else None
        self._runner = runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,  # a client that leaves ends its work
            shutdown_timeout=HANDLERS_GRACE,
        )
        await runner.setup()
        crowd = Crowd()
        for sock in self._sockets:
            try:
                await Site(runner, sock, crowd, tls=self._tls, access_log=access, keepalive_timeout=75.0).start()
            except OSError as error:  # another one that had bound it too listens since
                raise listen.refusal(error, self._config.server.host, self._config.server.port) from error
        scheme = "http" if self._tls is None else "https"
        self._url = next(filter(None, (listen.url_of(sock, scheme) for sock in self._sockets)), "")
        self._addresses = listen.addresses(self._sockets, scheme, self._config.server.ollama_port)

    # ------------------------------------------------------------------------------------------------- while it runs

    def reload_keys(self) -> None:
        """Read the file of API keys again; what is wrong in it is logged, and the old ones stay."""
        try:
            self._keys.reload()
            if self._keys:
                logger.info("%s", _keys_text(len(self._keys)))
            if self._store is not None:
                self._store.set_key_shares(self._keys.shares())
        except ConfigError as error:
            logger.error("the API keys were not changed: %s", error.message)

    async def _apply_rule(self, rule: str, setting: str, app: str) -> Applied:
        """Put a rule of `[stable]` in force, and write it into the configuration file if that may be written."""
        if self._reloader is None:
            raise UnavailableError("the daemon is starting", retry_after=2)
        return await self._reloader.apply_rule(rule, setting, app, self._settings_file)

    def _show(self) -> None:
        """Tell systemd and whoever watches what the models are doing."""
        if self._pool is None or self._draining or not self._url:
            return
        status = self._pool.status()
        model, reason, progress = status["model"], status["reason"], float(status["progress"])
        match status["state"]:
            case "ok":
                self._was_ready = True
                count = len(status["models"])
                what = f"{model} is ready" if count == 1 else f"ready with {count} models"
                self._say(DaemonState("ready", f"{what} at {self._addresses}", 1.0, self._url))
            case "no model":
                self._say(DaemonState("ready", f"ready without a model at {self._addresses}", 1.0, self._url))
            case "loading":
                text = f"loading {model}" + (f" again: {reason}" if reason else "")
                self._say(DaemonState("loading", text, progress, self._url))
            case _ if self._was_ready:  # else that is the daemon's end, and its error
                self._say(DaemonState("loading", f"cannot load {model}: {reason}", progress, self._url))

    def _say(self, state: DaemonState) -> None:
        if state == self._told:
            return
        self._told = state
        status = f"{state.message} ({state.progress:.0%})" if state.phase == "loading" else state.message
        self._systemd.notify(STATUS=status)
        self._on_state(state)

    async def _feed_watchdog(self) -> None:
        """Tell systemd that this loop runs and that no worker is silent beyond what the pool would have ended."""
        if self._systemd.watchdog is None:
            return
        while True:
            if self._pool is None or self._pool.fresh(self._limits.silence + WATCHDOG_SLACK):
                self._systemd.notify(WATCHDOG="1")
            await asyncio.sleep(self._systemd.watchdog / 3)

    async def _close_while_draining(self, _request: Any, response: web.StreamResponse) -> None:
        if self._draining:
            response.force_close()
            response.headers["Connection"] = "close"

    # ------------------------------------------------------------------------------------------------- stop

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> list[int]:
        handled: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                continue
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self._on_signal, number)
                handled.append(number)
        return handled

    def _watch_owner(self, loop: asyncio.AbstractEventLoop) -> int | None:
        """Stop with the program that has started this daemon, where it has left us a pipe to tell by."""
        text = self._environ.pop(OWNER_FD, "")
        if not text.isdigit():
            return None
        owner = int(text)
        try:
            loop.add_reader(owner, self._on_owner, owner)
        except OSError as error:
            raise ConfigError(f"{OWNER_FD}={text} is no open pipe: {error.strerror}") from error
        return owner

    def _on_owner(self, owner: int) -> None:
        if not os.read(owner, 4096):
            asyncio.get_running_loop().remove_reader(owner)
            logger.info("the program that started this daemon has ended: stopping")
            self._stop.set()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and not self._stop.is_set() and self._reload():
            return
        if not self._stop.is_set():
            logger.info("%s: stopping", signal.Signals(number).name)
            self._stop.set()
            return
        logger.warning("%s again: ending at once", signal.Signals(number).name)
        if self._pool is not None:
            self._pool.kill()
        if self._store is not None:
            self._store.kill()
        if self._file is not None:
            self._file.remove()
        os._exit(128 + number)

    def _reload(self) -> bool:
        """Read the configuration again, at SIGHUP; False where that means that our terminal was closed."""
        if self._load is None or (self._had_terminal and not has_terminal()):
            return False
        if self._reloader is None or (self._reloading is not None and not self._reloading.done()):
            logger.warning("SIGHUP: not now, the daemon is starting or reads its configuration already")
        else:
            self.reload_keys()
            self._reloading = asyncio.create_task(self._reloader.reload(), name="reload")
        return True

    async def _end(self) -> None:
        """Stop what was started, in order, whatever was reached."""
        self._draining = True
        if self._reloading is not None:
            self._reloading.cancel()
            await asyncio.gather(self._reloading, return_exceptions=True)
        self._systemd.notify(STOPPING="1")
        self._say(DaemonState("stopping", "stopping", 0.0, self._url))
        pool, runner, store = self._pool, self._runner, self._store
        if pool is not None:
            pool.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pool.idle(), self._config.server.grace)
            await pool.stop(0.0)
        if self._file_keeper is not None:
            self._file_keeper.cancel()
            await asyncio.gather(self._file_keeper, return_exceptions=True)
        if runner is not None:
            await runner.cleanup()
        listen.close(self._sockets)
        if store is not None:
            await store.stop(FLUSH_GRACE)
        if self._watchdog is not None:  # fed until here, so that a long flush is not taken for a hang
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
        if self._file is not None:
            self._file.remove()
