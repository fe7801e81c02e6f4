"""One value of a setting, from text or TOML: its type, and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from .config import GPU_LAYERS_AUTO, KV_TYPES_WITHOUT_FLASH, PINNED
from .config_adapters import parse_adapters
from .config_app_rules import parse_app_rules
from .config_keys import APP_RULES, Key, Origin, near, refuse
from .config_tables import TablesError
from .config_vectors import parse_vectors
from .errors import ConfigError
from .expressions import is_expression, joined

_UNITS = {
    unit.lower(): factor
    for power, letter in enumerate("KMGT", start=1)
    for unit, factor in ((f"{letter}iB", 1024**power), (f"{letter}B", 1000**power))
} | {"": 1, "b": 1}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
MAX_SIZE = 64 << 40
"""Bytes. A process can map twice as many."""

_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

_TABLES: Mapping[str, Callable[[Any], list[dict[str, Any]]]] = {
    "adapters": parse_adapters,
    "control_vectors": parse_vectors,
    "app_rules": parse_app_rules,
}

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def parse(key: Key, value: Any, origin: Origin, percent: dict[str, float]) -> Any:
    """`value` from any source as the setting's type. A percentage is put into `percent` for later.

    Raises ConfigError.
    """
    if key.automatic and isinstance(value, str) and value.strip().lower() == "auto":
        return 0
    match key.kind:
        case "str":
            return _text(key, value, origin)
        case "choice":
            meant = near(value, key.choices) if isinstance(value, str) else ""
            allowed = ", ".join(choice or "empty" for choice in key.choices)
            return value if value in key.choices else refuse(origin, key.path, value, allowed + meant)
        case "int":
            return _whole(key, value, origin)
        case "float":
            return _real(key, value, origin)
        case "bool":
            return _truth(key, value, origin)
        case "size":
            return _size(key, value, origin, percent)
        case "adapters" | "control_vectors" | "app_rules":
            try:
                return _TABLES[key.kind](value)
            except TablesError as error:
                raise ConfigError(f"{origin}: {key.path}: {error}", param=key.path) from error


def _text(key: Key, value: Any, origin: Origin) -> str:
    if not isinstance(value, str):
        refuse(origin, key.path, value, "text")
    if "\0" in value or not _is_unicode(value):
        refuse(origin, key.path, value, "text in UTF-8 without NUL")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of a command line or an environment that are no UTF-8
        return False
    return True


def _whole(key: Key, value: Any, origin: Origin) -> int:
    if key.path == "model.gpu_layers" and value == "auto":
        return GPU_LAYERS_AUTO
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if key.name == "cache_share" and isinstance(value, str) and (found := re.fullmatch(r"\s*(\d{1,3})\s*%\s*", value)):
        return int(found[1])
    if isinstance(value, str) and origin.kind != "file" and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
        return int(value)
    automatic = key.automatic or key.name == "gpu_layers"
    return refuse(origin, key.path, value, "a whole number" + (", or auto" if automatic else ""))


def _real(key: Key, value: Any, origin: Origin) -> float:
    if isinstance(value, str) and origin.kind != "file":
        try:
            value = float(value)
        except ValueError:
            refuse(origin, key.path, value, "a number of seconds, such as 2 or 0.5")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(origin, key.path, value, "a number of seconds, such as 2 or 0.5")
    return float(value)


def _truth(key: Key, value: Any, origin: Origin) -> bool:
    if isinstance(value, str) and origin.kind != "file" and value.strip().lower() in _TRUTHS:
        return _TRUTHS[value.strip().lower()]
    if not isinstance(value, bool):
        refuse(origin, key.path, value, "true or false")
    return value


def _size(key: Key, value: Any, origin: Origin, percent: dict[str, float]) -> int:
    share = {"cache.hot": "memory", "models.memory": "memory", "cache.warm": "the disk"}.get(key.path)
    allowed = "a size such as 20GiB, 500MB or a number of bytes"
    if share:
        allowed += f", or a share of {share} such as 10%"
    if key.automatic:
        allowed += ", or auto"
    if isinstance(value, str):
        found = _PERCENT.fullmatch(value.strip())
        if found and share:
            if not 0 < float(found[1]) <= 100:
                refuse(origin, key.path, value, "more than 0% and at most 100%")
            percent[key.path] = float(found[1])
            return 0
        size = parse_size(value)
    else:
        size = value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
    if size is None:
        refuse(origin, key.path, value, allowed)
    if size > MAX_SIZE:
        refuse(origin, key.path, value, f"at most {MAX_SIZE >> 40}TiB")
    return size


def parse_size(text: str) -> int | None:
    """Bytes of `20GiB`, `500MB` (decimal), `1.5 GiB` or `1048576`; None if it is no size."""
    found = _SIZE.fullmatch(text.strip())
    if not found or found[2].lower() not in _UNITS:
        return None
    if not found[2] and "." in found[1]:
        return None
    return round(float(found[1]) * _UNITS[found[2].lower()]) if found[2] else int(found[1])


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: low <= value <= high


_MIB = 1 << 20
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+/?", re.IGNORECASE)

_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "server.host": (lambda value: bool(value.strip()), "an address to listen on, such as 127.0.0.1 or 0.0.0.0"),
    "server.port": (_between(0, 65535), "1 to 65535, or 0 for any free port"),
    "server.ollama_port": (_between(0, 65535), "a port such as 11434, or 0 for none"),
    "server.cors_origins": (
        lambda value: all(_ORIGIN.fullmatch(one) for one in value.replace(",", " ").split()),
        "origins such as https://chat.home.lan, by spaces, or *",
    ),
    "server.max_body": (_between(1024, 1 << 40), "1KiB to 1TiB"),
    "server.grace": (_between(0, 3600), "0 to 3600 seconds"),
    "server.keep_alive": (_between(0.1, 3600), "0.1 to 3600 seconds"),
    "model.alias": (str.isprintable, "text without control characters, or empty for the file's name"),
    "model.ctx": (
        lambda value: value == 0 or 64 <= value <= 1 << 26,
        f"at least 64 tokens and at most {1 << 26}, or auto (0)",
    ),
    "model.pool": (
        lambda value: value == 0 or 64 <= value <= 1 << 28,
        f"at least 64 cells and at most {1 << 28}, or auto (0)",
    ),
    "model.parallel": (_between(0, 64), "1 to 64, or auto (0)"),
    "model.threads": (_between(0, 1024), "1 to 1024, or auto (0)"),
    "model.batch": (lambda value: 64 <= value <= 65536 and value % 64 == 0, "a multiple of 64, from 64 to 65536"),
    "model.gpu_layers": (_between(GPU_LAYERS_AUTO, 10000), "0 to 10000, -1 for all, or auto"),
    "model.keep_alive": (
        lambda value: value in (PINNED, 0) or 1 <= value <= 1e9,
        "1 to 1000000000 seconds, -1 to load it at the start and keep it, or auto (0)",
    ),
    "model.cache_share": (_between(0, 100), "a percentage of cache.warm, 1 to 100, or 0 for no bound"),
    "models.memory": (lambda value: value == 0 or value >= 64 * _MIB, "at least 64MiB, or auto (0)"),
    "model.template_timeout": (_between(0.01, 600), "0.01 to 600 seconds"),
    "model.max_queue": (_between(1, 100_000), "1 to 100000"),
    "model.max_stall": (_between(0.01, 600), "0.01 to 600 seconds"),
    "cache.hot": (lambda value: value == 0 or value >= _MIB, "at least 1MiB, or auto (0); reuse = off does without"),
    "cache.warm": (lambda value: value == 0 or value >= _MIB, "at least 1MiB, or auto (0); reuse = off does without"),
    "cache.compression": (_between(0, 19), "0 (raw) to 19"),
    "cache.tail_delay": (_between(0, 3600), "0 to 3600 seconds"),
    "cache.write_queue": (lambda value: value == 0 or value >= _MIB, "at least 1MiB, or auto (0)"),
    "records.keep": (_between(1, 100_000), "1 to 100000"),
    "records.file_size": (_between(4096, 1 << 40), "4KiB to 1TiB"),
    "records.files": (_between(0, 1000), "0 to 1000"),
    "stable.custom": (is_expression, "a regular expression of Python's `re`"),
    "stable.move": (is_expression, "a regular expression of Python's `re`"),
}


def check(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> None:
    """All values together, by path, with what each was given by. Raises ConfigError."""
    for path, (holds, allowed) in _CHECKS.items():
        if not holds(values[path]):
            refuse(origins[path], path, values[path], allowed)
    for name in ("custom", "move"):
        for one in values[APP_RULES]:
            if not is_expression(joined(values[f"stable.{name}"], one.get(name, ""))):
                raise ConfigError(
                    f"{origins[APP_RULES]}: {name} of {one['app']!r} cannot be used together with stable.{name}: it is"
                    " put behind that and a |, so it may have no flags such as (?i) at its beginning",
                    param=APP_RULES,
                )
    of_v = "model.kv_type_v" if values["model.kv_type_v"] else "model.kv_type"
    if values[of_v] not in KV_TYPES_WITHOUT_FLASH and values["model.flash_attention"] == "off":
        raise ConfigError(
            f"{origins[of_v]}: {of_v} {values[of_v]!r} needs flash attention, which is off by"
            f" {origins['model.flash_attention']}; set model.flash_attention = 'on', or model.kv_type_v to one of"
            f" {', '.join(KV_TYPES_WITHOUT_FLASH)}",
            param=of_v,
        )
    if values["server.tls_key"] and not values["server.tls_cert"]:
        raise ConfigError(
            f"{origins['server.tls_key']}: server.tls_key needs server.tls_cert, the certificate",
            param="server.tls_key",
        )
    if values["server.ollama_port"] and values["server.ollama_port"] == values["server.port"]:
        refuse(origins["server.ollama_port"], "server.ollama_port", values["server.port"], "another than server.port")
    if 0 < values["model.pool"] < values["model.ctx"]:
        raise ConfigError(
            f"{origins['model.pool']}: model.pool cannot be {values['model.pool']}: it holds every request's tokens, so"
            f" allowed: at least model.ctx ({values['model.ctx']}, {origins['model.ctx']}), or auto (0)",
            param="model.pool",
        )
