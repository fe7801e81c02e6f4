"""Checking: from JSON to typed values, and errors that name the field and what is allowed.

What all dialects share; what a dialect's body looks like is in its own file.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec

from ..config_adapters import MAX_ADAPTERS, MAX_SCALE
from ..errors import RequestError
from ..frames.worker import LoraChoice, Sampling

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)

Number = int | float | None
"""A field that holds a number; whole ones are also taken as 3.0, which some clients send."""

MAX_COUNT = 2**31 - 1
MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
"""Of one message's content."""
MAX_TOOLS = 1000
MAX_VALUES = 100_000
"""In a field that is passed on as it came. While a body is taken apart, nobody else is served."""
MAX_BIASES = 100_000
MAX_BRACKETS, MAX_COMMAS = 1_000_000, 10_000_000
"""In a body, texts included: more than any prompt has that a model could take, less than a second's work."""

_LARGE = 1 << 20  # bytes of a body that is looked at before it is taken apart
MAX_STOPS = 32
MAX_STOP_LENGTH = 1024
MAX_NESTING = 64
MAX_SAMPLERS = 32
MAX_BREAKERS = 16
"""Of DRY: llama.cpp looks through the whole vocabulary for each."""
MAX_BREAKER_BYTES = 40
"""llama.cpp cuts off what is longer."""
MAX_LOGPROBS = 20
"""Of values that are passed on as they came (tools, template arguments): no decoder on their way may overflow."""

One = TypeVar("One")

Messages = Annotated[list[One], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
Parts = Annotated[list[One], msgspec.Meta(max_length=MAX_PARTS)]
Tools = Annotated[list[One], msgspec.Meta(max_length=MAX_TOOLS)]
"""Lists in a body with their bounds, which are those of its description, too."""

_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
"""Escapes in JSON; `half` is half of a character, as a text has that was cut within an emoji."""

_EXPECTED = re.compile(r"Expected `(.+)`, got `(.+)`$")
_LENGTH = re.compile(r"Expected `\w+` of length (>=|<=) (\d+)$")
_MISSING = re.compile(r"missing required field `(.+)`$")
_NAMES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


def _mended(match: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if match["half"] else match[0]


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage is collected meanwhile: with a million new objects that takes ten times as long as all else."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _decoded(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        mended = _ESCAPES.sub(_mended, body)
        if mended == body:
            raise
        return msgspec.json.decode(mended, type=kind)


def _check_size(body: bytes) -> None:
    """Raises RequestError."""
    if len(body) < _LARGE:
        return
    for what, signs, most in (("objects and lists", (b"{", b"["), MAX_BRACKETS), ("values", (b",",), MAX_COMMAS)):
        if sum(map(body.count, signs)) > most:
            raise RequestError(f"The request's body has more than {most} {what}.", code="out_of_range")


def decode(body: bytes, kind: type[Body], ignored: frozenset[str] = frozenset()) -> Body:
    """A request's body. `ignored`: fields that are known and need nothing done. Raises RequestError."""
    _check_size(body)
    try:
        with _without_collections():
            value = _decoded(body, kind)
    except msgspec.ValidationError as error:
        raise _explain(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The request's body is not JSON: {error}.", code="bad_json") from error
    except RecursionError as error:
        raise RequestError("The request's body is nested too deeply.", code="bad_json") from error
    if logger.isEnabledFor(logging.DEBUG):
        known = {field.encode_name for field in msgspec.structs.fields(kind)} | ignored
        unknown = msgspec.json.decode(_ESCAPES.sub(_mended, body), type=dict[str, msgspec.Raw]).keys() - known
        if unknown:
            logger.debug("ignored fields: %s", ", ".join(sorted(unknown)))
    return value


def _type_names(names: str) -> str:
    words = [_NAMES.get(name, name) for name in names.split(" | ")]
    if "number" in words:
        words = [word for word in words if word != "integer"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _explain(error: msgspec.ValidationError) -> RequestError:
    """msgspec's message in JSON's words, with the field as `param`."""
    what, _, path = str(error).partition(" - at `")
    param = path.rstrip("`").removeprefix("$").removeprefix(".")
    if missing := _MISSING.search(what):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return RequestError(f"`{param}` is missing.", param=param, code="missing_field")
    shown = f"`{param}`" if param else "The request's body"
    if length := _LENGTH.search(what):
        bound = f"have at most {length[2]} items" if length[1] == "<=" else "not be empty"
        return RequestError(f"{shown} must {bound}.", param=param or None, code="out_of_range")
    if expected := _EXPECTED.search(what):
        text = f"{shown} must be {_type_names(expected[1])}, not {_type_names(expected[2])}."
    else:
        text = f"{shown}: {what}."
    return RequestError(text, param=param or None, code="wrong_type")


def set_effort(template_kwargs: dict[str, Any], effort: str | None) -> None:
    """How much a model is to think, for its template. What the client says itself in `template_kwargs` stays.

    None at all is also what templates ask for that know no efforts.
    """
    if effort:
        template_kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            template_kwargs.setdefault("enable_thinking", False)


def check_plain(name: str, value: Any) -> None:
    """Refuse what the next processes could not take: nesting beyond MAX_NESTING, numbers beyond 64 bits, more than
    MAX_VALUES values."""
    level, count = [value], 0
    for _ in range(MAX_NESTING):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, int) and not -(2**63) <= item < 2**64:
                raise RequestError(f"`{name}` contains a number of more than 64 bits.", param=name, code="out_of_range")
            if len(below) + count > MAX_VALUES:
                raise RequestError(
                    f"`{name}` must have at most {MAX_VALUES} values in all.", param=name, code="out_of_range"
                )
        if not below:
            return
        count += len(below)
        level = below
    raise RequestError(f"`{name}` is nested more than {MAX_NESTING} levels deep.", param=name, code="out_of_range")


def number(name: str, value: Number, low: float, high: float, *, open_low: bool = False) -> float | None:
    """`value` if it lies in [low, high], or (low, high] with `open_low`; None stays None."""
    if value is None:
        return None
    if not low <= value <= high or (open_low and value == low):  # also true of NaN
        least = f"more than {low:g}" if open_low else f"at least {low:g}"
        raise RequestError(f"`{name}` must be {least} and at most {high:g}.", param=name, code="out_of_range")
    return float(value)


def whole(name: str, value: Number, low: int, high: int = MAX_COUNT) -> int | None:
    """As `number`, for whole ones. Above `high` is `high` where that is MAX_COUNT: it means "no limit"."""
    if value is None:
        return None
    if isinstance(value, float):
        if not value.is_integer():
            raise RequestError(f"`{name}` must be a whole number, not {value:g}.", param=name, code="wrong_type")
        value = int(value)
    if value > high == MAX_COUNT:
        return high
    if not low <= value <= high:
        bounds = f"at least {low}" if high == MAX_COUNT else f"from {low} to {high}"
        raise RequestError(f"`{name}` must be {bounds}.", param=name, code="out_of_range")
    return value


def logprobs(wanted: bool | None, top: Number) -> int:
    """`Generate.logprobs` of `logprobs` and `top_logprobs`. Raises RequestError."""
    count = whole("top_logprobs", top, 0, MAX_LOGPROBS)
    if wanted:
        return count or 0
    if count:
        raise RequestError("`top_logprobs` needs `logprobs`: set it to true.", param="top_logprobs", code="conflict")
    return -1


def stop_strings(value: str | list[str] | None) -> list[str]:
    """Stop strings as a list; empty ones, which some clients send for "none", are left out."""
    stops = [stop for stop in ([value] if isinstance(value, str) else value or []) if stop]
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise RequestError(
            f"`stop` takes at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters.",
            param="stop",
            code="out_of_range",
        )
    return stops


LogitBias = dict[str, float | bool] | list[tuple[int | str, float | bool]] | None
"""Some dialects also take texts as keys, and turn them into token ids first."""


def logit_bias(value: LogitBias, n_vocab: int | None) -> dict[int, float]:
    """Token id -> bias. `false` bans a token, as in llama-server."""
    if len(value or ()) > MAX_BIASES:
        raise RequestError(
            f"`logit_bias` must have at most {MAX_BIASES} items.", param="logit_bias", code="out_of_range"
        )
    bias: dict[int, float] = {}
    for key, amount in value.items() if isinstance(value, dict) else value or []:
        text = str(key)
        if not (text.isascii() and text.isdigit() and len(text) < 10 and (n_vocab is None or int(text) < n_vocab)):
            among = "" if n_vocab is None else f" below {n_vocab}"
            raise RequestError(
                f"`logit_bias` takes token ids{among} as keys, not {text[:40]!r}.", param="logit_bias", code="bad_token"
            )
        if amount is True or not math.isfinite(amount):
            raise RequestError(
                "`logit_bias` takes finite numbers or false as values.", param="logit_bias", code="wrong_type"
            )
        bias[int(text)] = -math.inf if amount is False else float(amount)
    return bias


class LoraField(msgspec.Struct):
    """An adapter: its id, or its place in the list of the model's adapters."""

    id: int | str
    scale: Number = None


def lora(value: list[LoraField] | None) -> list[LoraChoice] | None:
    """Adapters of a request; which ones there are is known to the model's worker. Raises RequestError."""
    if value is None:
        return None
    if len(value) > MAX_ADAPTERS:
        raise RequestError(f"`lora` takes at most {MAX_ADAPTERS} adapters.", param="lora", code="out_of_range")
    return [
        LoraChoice(
            one.id if isinstance(one.id, str) else whole(f"lora[{index}].id", one.id, 0) or 0,
            number(f"lora[{index}].scale", one.scale, -MAX_SCALE, MAX_SCALE),
        )
        for index, one in enumerate(value)
    ]


_SAMPLER_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": "infill",
}  # fmt: skip
"""llama.cpp's letters for its samplers -> its names."""

_SAMPLER_NAMES = {
    "nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical_p": "typ_p",
    **{name.replace("_", joint): name for name in _SAMPLER_LETTERS.values() for joint in ("_", "-", "")},
}  # fmt: skip
"""How else llama.cpp lets them be spelt -> its names."""


def samplers(value: str | list[str] | None) -> tuple[str, ...] | None:
    """Names of samplers in the order in which they are applied, or a text of letters for them. Raises RequestError.

    What is no sampler here is left out, as llama.cpp does: apps send their whole list, with those of other versions
    (`tfs_z`, `adaptive_p`).
    """
    if value is None:
        return None
    if len(value) > MAX_SAMPLERS:
        raise RequestError(f"`samplers` takes at most {MAX_SAMPLERS} samplers.", param="samplers", code="out_of_range")
    known = _SAMPLER_LETTERS if isinstance(value, str) else _SAMPLER_NAMES
    names = (known.get(given if isinstance(value, str) else given.lower()) for given in value)
    found = tuple(name for name in names if name is not None)
    if value and not found:
        shown = ", ".join(f"{letter} ({name})" for letter, name in _SAMPLER_LETTERS.items())
        raise RequestError(
            f"`samplers` has {value[0][:40]!r}, and nothing in it is a sampler: take"
            f" {shown if isinstance(value, str) else ', '.join(_SAMPLER_LETTERS.values())}.",
            param="samplers",
            code="unsupported_value",
        )
    return found


def sequence_breakers(value: list[str] | None) -> tuple[str, ...] | None:
    """Texts that end a repetition. Raises RequestError."""
    if value is None:
        return None
    sizes = [len(text.encode(errors="surrogatepass")) for text in value]
    fits = 0 < len(value) <= MAX_BREAKERS and min(sizes) > 0 and max(sizes) <= MAX_BREAKER_BYTES
    if not fits or any("\0" in text for text in value):
        raise RequestError(
            f"`dry_sequence_breakers` takes 1 to {MAX_BREAKERS} texts of 1 to {MAX_BREAKER_BYTES} bytes, without NUL.",
            param="dry_sequence_breakers",
            code="out_of_range",
        )
    return tuple(value)


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of a body that set the sampler, named as llama-server names them. Dialects inherit them."""

    temperature: Number = None
    top_p: Number = None
    top_k: Number = None
    min_p: Number = None
    typical_p: Number = None
    repeat_penalty: Number = None
    repeat_last_n: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    seed: Number = None
    logit_bias: LogitBias = None
    ignore_eos: bool | None = None
    min_tokens: Number = None
    top_n_sigma: Number = None
    xtc_probability: Number = None
    xtc_threshold: Number = None
    dynatemp_range: Number = None
    dynatemp_exponent: Number = None
    mirostat: Number = None
    mirostat_tau: Number = None
    mirostat_eta: Number = None
    dry_multiplier: Number = None
    dry_base: Number = None
    dry_allowed_length: Number = None
    dry_penalty_last_n: Number = None
    dry_sequence_breakers: list[str] | None = None
    samplers: str | list[str] | None = None

    def sampling(self, n_vocab: int | None) -> Sampling:
        """Checked, with the defaults of `Sampling` for what is absent. Raises RequestError."""
        seed = whole("seed", self.seed, -(2**63), 2**64)
        given: dict[str, Any] = {
            "temperature": number("temperature", self.temperature, 0, 100),
            "top_p": number("top_p", self.top_p, 0, 1),
            "top_k": whole("top_k", self.top_k, -1),
            "min_p": number("min_p", self.min_p, 0, 1),
            "typical_p": number("typical_p", self.typical_p, 0, 1),
            "repeat_penalty": number("repeat_penalty", self.repeat_penalty, 0, 100, open_low=True),
            "repeat_last_n": whole("repeat_last_n", self.repeat_last_n, -1),
            "presence_penalty": number("presence_penalty", self.presence_penalty, -100, 100),
            "frequency_penalty": number("frequency_penalty", self.frequency_penalty, -100, 100),
            "seed": None if seed is None else -1 if seed < 0 else seed % 2**32,  # llama.cpp takes 32 bits
            "ignore_eos": self.ignore_eos,
            "min_tokens": whole("min_tokens", self.min_tokens, 0),
            "top_n_sigma": number("top_n_sigma", self.top_n_sigma, -1, 100),
            "xtc_probability": number("xtc_probability", self.xtc_probability, 0, 1),
            "xtc_threshold": number("xtc_threshold", self.xtc_threshold, 0, 1),
            "dynatemp_range": number("dynatemp_range", self.dynatemp_range, 0, 100),
            "dynatemp_exponent": number("dynatemp_exponent", self.dynatemp_exponent, 0, 100),
            "mirostat": whole("mirostat", self.mirostat, 0, 2),
            "mirostat_tau": number("mirostat_tau", self.mirostat_tau, 0, 100),
            "mirostat_eta": number("mirostat_eta", self.mirostat_eta, 0, 1),
            "dry_multiplier": number("dry_multiplier", self.dry_multiplier, 0, 100),
            "dry_base": number("dry_base", self.dry_base, 0, 100),
            "dry_allowed_length": whole("dry_allowed_length", self.dry_allowed_length, 0),
            "dry_penalty_last_n": whole("dry_penalty_last_n", self.dry_penalty_last_n, -1),
            "dry_sequence_breakers": sequence_breakers(self.dry_sequence_breakers),
            "samplers": samplers(self.samplers),
        }
        if given["dry_base"] is not None and given["dry_base"] < 1:  # as llama-server has it
            given["dry_base"] = None
        chosen = {name: value for name, value in given.items() if value is not None}
        return Sampling(**chosen, logit_bias=logit_bias(self.logit_bias, n_vocab))
