"""The main job's bars, measured: `homeprefixd bench main [--llama-server PATH]`.

Every figure is a ratio of things measured in this run, on this machine, medians of interleaved pairs; the servers
run side by side and are asked in turn, so that a slow minute of the machine falls on both. A peer that is not given is
left out, and the rows that need it say so.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from ..errors import ConfigError
from .household import household_messages
from .many_nodes import fill
from .rows import Row
from .server import Server, homeprefixd, llama_server
from .stream import Answer, ask

PREFIX_TOKENS = 2200
NODES = 100_000
_COPIES = 6


def question(number: int) -> str:
    """A short question that no other number asks (about ten tokens)."""
    return f"Which window is number {number}, {number * 7919 % 10007}?"


def body(number: int, *, seed: int = 0, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """A greedy chat request: the household prompt of `seed`, then question `number`."""
    messages = household_messages(question(number), seed=seed, size=PREFIX_TOKENS)
    return {"messages": messages, "temperature": 0, "max_tokens": max_tokens, **more}


class MainJob:
    """Runs the scenarios one after another; `say` gets a line of progress before each."""

    def __init__(
        self,
        model: str,
        threads: int,
        *,
        peer: str | None,
        peer_flags: Sequence[str],
        pairs: int,
        only: Sequence[str] = (),
        say: Callable[[str], None],
    ) -> None:
        self.model = model
        self.peer_flags = list(peer_flags)
        self.only = tuple(only)
        self.threads = threads
        self.peer_binary = peer
        self.pairs = pairs
        self.say = say
        self.rows: list[Row] = []
        self.numbers = iter(range(1, 1_000_000))
        self.directory = Path(tempfile.mkdtemp(prefix="homeprefixd-bench-"))

    def ours(self, name: str, *flags: str) -> Server:
        """This daemon with a cache directory `name` of this run, 1 GiB hot and 4 GiB warm unless `flags` differ."""
        sizes = [] if "--hot" in flags else ["--hot", "1GiB", "--warm", "4GiB"]
        model = ["--model", self.model, "--threads", str(self.threads), "--ctx", "4096", *sizes]
        return homeprefixd(self.directory / name, *model, *flags)

    def peer(self) -> Server | None:
        """llama-server with the same model, threads and context, or None."""
        if self.peer_binary is None:
            return None
        flags = ["--threads", str(self.threads), "--ctx-size", "4096", "--parallel", "1", "--no-webui"]
        return llama_server(self.peer_binary, self.model, *flags, *self.peer_flags)

    def run(self) -> list[Row]:
        """All scenarios; leaves no process and no file behind."""
        scenarios = {s.__name__: s for s in (self.reuse, self.saving, self.decode, self.conversations, self.footprint)}
        if unknown := [name for name in self.only if name not in scenarios]:
            raise ConfigError(f"There is no scenario {unknown[0]!r}: there are {', '.join(scenarios)}.")
        try:
            for scenario in [scenarios[name] for name in self.only or scenarios]:
                self.say(f"{scenario.__name__}: {(scenario.__doc__ or '').splitlines()[0]}")
                scenario()
            return self.rows
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def report(self, what: str, value: float, bar: float, at_most: bool, note: str) -> None:
        """Append a row; `bar` is what `value` may be at most (or must be at least)."""
        met = value <= bar if at_most else value >= bar
        self.rows.append(Row(what, value, f"{'<=' if at_most else '>='} {bar:g}", met, note))

    def left_out(self, what: str, why: str) -> None:
        """Append a row that could not be measured."""
        self.rows.append(Row(what, None, "", None, why))

    # ------------------------------------------------------------------------------------------------- scenarios

    def reuse(self) -> None:
        """cold, hot, after a restart, and the peer's RAM hit"""
        server, peer = self.ours("reuse"), self.peer()
        with _running(server, peer):
            per_token = kv_bytes_per_token(server)
            cold = [ask(server.url, body(next(self.numbers), seed=seed)).ttft for seed in (101, 102, 0)]
            if peer:
                ask(peer.url, body(next(self.numbers)))
            hot: list[Answer] = []
            theirs: list[Answer] = []
            for _ in range(self.pairs):
                number = next(self.numbers)
                hot.append(ask(server.url, body(number)))
                if peer:
                    theirs.append(ask(peer.url, body(number)))
            restarts: dict[str, list[tuple[Answer, Answer]]] = {"": [], ", nothing preloaded": []}
            for _ in range(self.pairs):
                for kind, pairs in restarts.items():
                    server.stop()
                    server.env = {**server.env, "HOMEPREFIXD_CACHE_PRELOAD": "0" if kind else "256MiB"}
                    server.start()
                    pairs.append((ask(server.url, body(next(self.numbers))), ask(server.url, body(next(self.numbers)))))
        hot_ttft = median(a.ttft for a in hot)
        cold_ttft = median(cold)
        for kind, pairs in restarts.items():
            ratio = median(first.ttft / second.ttft for first, second in pairs)
            after = median(first.ttft for first, _second in pairs)
            note = f"cold {cold_ttft:.2f} s, hot {hot_ttft * 1e3:.0f} ms, after a restart {after * 1e3:.0f} ms"
            self.report(f"TTFT after a restart{kind} / hot", ratio, 1.3, True, note)
            self.report(f"TTFT cold / after a restart{kind}", cold_ttft / after, 50, False, note)
        if peer:
            ratio = median(a.ttft / b.ttft for a, b in zip(hot, theirs, strict=True))
            their_ttft = median(a.ttft for a in theirs)
            self.report("TTFT hot / llama-server's RAM hit", ratio, 1.3, True, f"theirs {their_ttft * 1e3:.0f} ms")
        else:
            self.left_out("TTFT hot / llama-server's RAM hit", "no --llama-server")
        warm = [first for first, _second in restarts[", nothing preloaded"]]
        for name, answers, bar in (("hot", hot, 3.0), ("warm", warm, 1.0)):
            tiers = [a.timings.get("cache_tiers", {}).get(name, 0) for a in answers]
            rates = [a.timings["cache_n"] * per_token / a.timings["restore_ms"] / 1e6 for a in answers]
            restored = median(a.timings["restore_ms"] for a in answers)
            copied = plain_copy_ms(int(median(tiers) * per_token))
            note = f"{median(tiers):.0f} tokens from {name} in {restored:.1f} ms; a plain copy takes {copied:.1f} ms"
            self.report(f"{name} tier to context, GB/s", median(rates), bar, False, note)

    def saving(self) -> None:
        """prefill with saving on and off, cold prompts"""
        server = self.ours("saving")
        with _running(server, None):
            ratios = []
            for pair in range(max(5, self.pairs)):
                on = {"cache_prompt": True}, 1000 + 2 * pair
                off = {"cache_prompt": False}, 1001 + 2 * pair
                times = {}
                for more, seed in (on, off) if pair % 2 else (off, on):
                    answer = ask(server.url, body(next(self.numbers), seed=seed, max_tokens=1, **more))
                    rate = answer.timings["prompt_n"] / answer.timings["prompt_ms"]
                    times[more["cache_prompt"]] = rate
                    time.sleep(4)  # what was saved is written now, in nobody's turn
                ratios.append(times[True] / times[False])
        self.report("prefill speed, saving on / off", median(ratios), 0.97, False, f"{len(ratios)} pairs")

    def decode(self) -> None:
        """decode speed of one stream beside the peer's"""
        server, peer = self.ours("decode"), self.peer()
        if peer is None:
            self.left_out("decode speed / llama-server's", "no --llama-server")
            return
        messages = [{"role": "user", "content": "Tell a long story about a lighthouse keeper."}]
        request = {"messages": messages, "temperature": 0, "max_tokens": 256, "ignore_eos": True}
        with _running(server, peer):
            ratios, rates = [], []
            for pair in range(self.pairs):
                order = (server, peer) if pair % 2 else (peer, server)
                measured = {one.name: ask(one.url, request).decode_rate for one in order}
                ratios.append(measured[server.name] / measured[peer.name])
                rates.append(measured[server.name])
        note = f"{median(rates):.1f} tokens/s, {len(ratios)} pairs"
        self.report("decode speed / llama-server's", median(ratios), 0.97, False, note)

    def conversations(self) -> None:
        """ten conversations over one shared prefix: what the disk holds"""
        server = self.ours("conversations")
        with _running(server, None):
            before = server.get("/cache/stats")["warm"]["bytes"]
            last: Answer | None = None
            for _ in range(10):
                last = ask(server.url, body(next(self.numbers), max_tokens=48))
            server.stop()
            server.start()
            stats = server.get("/cache/stats")
            prefixes = server.get("/cache/prefixes?limit=100")["prefixes"]
        used = stats["warm"]["bytes"] - before
        payload = stats["warm"]["payload_bytes"]
        total = sum(p["tokens"] for p in prefixes)
        own = sum(p["own_tokens"] for p in prefixes)
        note = f"{used / 1e6:.1f} MB for {payload / 1e6:.1f} MB of encoded nodes; {total} tokens in {len(prefixes)}"
        note += f" paths, {own} of them unshared; prompt {last.usage['prompt_tokens'] if last else 0}"
        self.report("warm bytes / compressed size of distinct nodes", used / payload, 1.1, True, note)

    def footprint(self) -> None:
        """daemon and store with 100,000 nodes and no model"""
        fill(self.directory / "footprint", NODES)
        ready, daemon, store = [], 0, 0
        for _ in range(3):
            flags = ["--model", "none", "--hot", "1GiB", "--warm", "4GiB"]
            server = homeprefixd(self.directory / "footprint", *flags)
            ready.append(server.start())
            try:
                server.get("/cache/stats")
                server.get("/cache/prefixes")
                if server.process is not None:
                    daemon = max(daemon, rss_anon(server.process.pid))
                    children = psutil.Process(server.process.pid).children()
                    store = max(store, *(rss_anon(child.pid) for child in children))
            finally:
                server.stop()
        note = f"{NODES} nodes, after listing prefixes"
        self.report("daemon RssAnon, MB", daemon / 1e6, 60, True, note)
        self.report("store RssAnon, MB", store / 1e6, 60, True, note)
        self.report("ready, s", median(ready), 1.0, True, "median of 3 starts; /health polled each 20 ms")


def plain_copy_ms(size: int) -> float:
    """What copying so many bytes takes here and now, from memory that no cache of the CPU holds: the median of some."""
    source, target = memoryview(b"\1" * (_COPIES * size)), memoryview(bytearray(size))
    times = []
    for start in range(0, _COPIES * size, size):
        began = time.perf_counter()
        target[:] = source[start : start + size]
        times.append((time.perf_counter() - began) * 1e3)
    return median(times[1:])


def kv_bytes_per_token(server: Server) -> float:
    """Bytes of KV state per token, as the daemon reports them."""
    return float(server.get("/cache/stats")["daemon"]["workers"][0]["kv_bytes_per_token"])


def rss_anon(pid: int) -> int:
    """RssAnon of a process in bytes (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


class _running:  # noqa: N801  # used as a function
    """Servers that run for the length of a `with` block; None is left out."""

    def __init__(self, *servers: Server | None) -> None:
        self.servers = [s for s in servers if s is not None]

    def __enter__(self) -> None:
        for server in self.servers:
            server.start()

    def __exit__(self, *exc: object) -> None:
        for server in self.servers:
            server.__exit__(*exc)
