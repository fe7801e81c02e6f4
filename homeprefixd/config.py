"""Every setting in one typed tree.

Only the tree, its defaults and their meaning; where values come from (TOML < environment < flags) is in
`config_sources.py`. A value of 0, "" or "auto" means that a value which fits the machine is chosen at start.
"""

from __future__ import annotations

from typing import Literal

import msgspec

KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
KV_TYPES_WITHOUT_FLASH = ("f16", "bf16", "f32")
"""Types that V can have without flash attention in llama.cpp. K can have any."""

GPU_LAYERS_AUTO = -2
"""`model.gpu_layers`, written as `auto`: as many as fit the devices' free memory."""

DEVICE_WEIGHTS = 0.7
"""Of a device's free memory; the rest is for KV state and compute buffers."""

PINNED = -1.0
"""`model.keep_alive` of a model that is loaded at the start and never unloaded."""


AT_ONCE = 8
"""`model.parallel`, written as `auto`: more than the pool has full contexts for, as most are short."""

FULL = 4
"""Requests of full length that the pool is for then, if memory allows; so many run where each costs memory."""


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """HTTP."""

    host: str = "127.0.0.1"
    port: int = 8080
    max_body: int = 64 << 20  # bytes of a request's body
    grace: float = 20.0  # seconds that running requests get at a clean stop
    keep_alive: float = 10.0  # seconds between SSE comments while a prompt is prefilled
    keys_file: str = ""  # API keys, see `api/keyring.py`; "": systemd's credential `api-keys`, if there is one
    allow_open: bool = False  # listen beyond this machine without keys
    ollama_port: int = 0  # a second port, for clients that know Ollama's (11434) only; 0: none
    tls_cert: str = ""  # PEM with the certificate and those that lead to its root; "": no TLS
    tls_key: str = ""  # PEM with its key; "": it is in `tls_cert`
    cors_origins: str = ""  # pages beside local ones whose scripts may call, by spaces or commas; "*": all


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter of a model."""

    id: str  # requests choose it by this, or as the model `MODEL:ID`
    path: str  # a GGUF
    scale: float = 1.0  # where a request does not say
    default: bool = False  # used by requests that name no adapter
    alias: str = ""  # a name of the model with this adapter; "": `MODEL:ID`


class ControlVectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A control vector of a model: directions that are added to what its layers put out, in every request."""

    path: str  # a GGUF, as llama.cpp's cvector-generator makes it
    scale: float = 1.0  # 0: not used
    first_layer: int = 0  # that it is added to, counted from 0 as llama.cpp counts; 0: from 1 on, as 0 has none
    last_layer: int = 0  # 0: to the model's last


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model and its context: the main one, and what those of `models` have where they say nothing else."""

    path: str = ""  # a GGUF; "": the demo model, where `models` has none
    alias: str = ""  # its name in the API; "": from the file's name
    ctx: int = 0  # tokens that one request may use; 0: from the model and memory
    pool: int = 0  # cells in all; 0: from parallel (4 where it is 0), ctx and memory
    parallel: int = 0  # requests that run at once; 0: AT_ONCE, or FULL where each needs memory of its own
    threads: int = 0  # 0: physical cores
    batch: int = 256  # longest prefill call, in tokens, a multiple of 64
    kv_type: str = "f16"  # of K, and of V where `kv_type_v` says nothing
    kv_type_v: str = ""  # of V; "": as `kv_type`
    flash_attention: Literal["auto", "on", "off"] = "auto"  # auto: on a GPU, and for a quantised V
    gpu_layers: int = 0  # -1: all; GPU_LAYERS_AUTO: as many as fit
    device: str = ""  # names of llama.cpp's devices, with commas between; "": all
    chat_template: str = ""  # path of a jinja template, or its text; "": the model's own
    template_timeout: float = 2.0  # seconds
    max_queue: int = 64  # waiting requests; more are answered 429
    max_stall: float = 0.5  # seconds
    keep_alive: float = 0.0  # seconds that it stays loaded unused; 0: for ever if it is the only one, else 300;
    #                          PINNED: it is loaded at the start and stays
    cache_share: int = 0  # percent of `cache.warm` that its prefixes may take; 0: no bound
    adapters: list[AdapterConfig] = []  # LoRA adapters that its requests can choose
    control_vectors: list[ControlVectorConfig] = []  # of all its requests, added up

    @property
    def type_v(self) -> str:
        """Of V, as resolved."""
        return self.kv_type_v or self.kv_type


class ModelsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several models, each loaded when it is first asked for."""

    dir: str = ""  # a folder of GGUF files, looked through again and again
    memory: int = 0  # bytes for weights, KV pools and the hot tier together; 0: what is free at the start
    entries: tuple[ModelConfig, ...] = msgspec.field(default=(), name="list")  # tables [[models.list]]


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prefix cache."""

    dir: str = ""  # "": $CACHE_DIRECTORY (systemd), else $XDG_CACHE_HOME/homeprefixd
    hot: int = 0  # bytes of RAM; given as "4GiB", or "10%" of memory; 0: auto; see `enabled` to do without
    warm: int = 0  # bytes of disk; given as "20GiB", or "10%" of the disk; 0: auto
    reuse: Literal["token", "exact", "off"] = "token"
    compression: int = 1  # zstd level; 0 stores raw
    tail_delay: float = 2.0  # seconds that a tail must have stopped growing before it is written
    write_queue: int = 0  # bytes that may wait to be written; 0: half of hot
    salt: str = ""  # another salt, another namespace
    daily_writes: int = 0  # bytes that may be written to the disk in a day; 0: no bound
    min_free: int = 0  # bytes of the disk that the cache leaves to others; 0: auto
    preload: int = 256 << 20  # bytes of what was used last that are loaded at the start, at most half of hot
    scrub_rate: int = 8 << 20  # bytes a second that are verified while nothing else happens; 0: none
    replay: Literal["on", "off"] = "on"  # on: what was generated is known by its text, token for token


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is said on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"


class RecordsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is remembered of each request."""

    keep: int = 500  # records in RAM
    file: str = ""  # where they are written too, one JSON object a line; "": nowhere
    file_size: int = 10 << 20  # bytes after which the file begins anew
    files: int = 5  # full files that are kept
    text: Literal["on", "off"] = "off"  # on: the file has the pieces of prompts that explanations show
    explain: Literal["on", "off"] = "on"  # on: say of each request why it did not reuse more


class AppRulesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is other for one app than `[stable]` says; "": as there. Expressions are added to those there."""

    app: str  # its name, as the records have it
    drop_billing_line: Literal["on", "off", ""] = ""
    move_volatile_line: Literal["on", "off", ""] = ""
    sort_tools: Literal["on", "off", ""] = ""
    sort_keys: Literal["on", "off", ""] = ""
    custom: str = ""
    move: str = ""


class StableConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules that keep prompts stable, so that they are reused."""

    drop_billing_line: Literal["on", "off"] = "on"  # a coding agent's first line, with a number that is never the same
    freeze_clock: Literal["on", "off"] = "on"  # templates that put the time into each prompt get the day only
    move_volatile_line: Literal["on", "off"] = "off"  # the system message's clock, to the last user message
    sort_tools: Literal["on", "off"] = "off"  # tools by name
    sort_keys: Literal["on", "off"] = "off"  # JSON keys of tools by name
    custom: str = ""  # a regular expression: what it finds in system messages is removed
    move: str = ""  # a regular expression: what it finds in system messages goes to the last user message
    apps: str = ""  # names of apps, or parts of them, by commas: the rules are for these only; "": for all
    per_app: list[AppRulesConfig] = []  # rules of single apps, also of those that `apps` leaves out


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The root of the tree."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    models: ModelsConfig = ModelsConfig()
    cache: CacheConfig = CacheConfig()
    log: LogConfig = LogConfig()
    records: RecordsConfig = RecordsConfig()
    stable: StableConfig = StableConfig()
