"""Frames between the daemon and a worker: `ToWorker` down, `FromWorker` up."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from . import Frame, Stop
from .store import Gone

# ---------------------------------------------------------------------------------------------- daemon -> worker


TOO_SLOW = " (too slow)"
"""Stands behind the name of a rule that was not applied, as its expression took too long."""


class AppRules(msgspec.Struct, frozen=True):
    """What is other for one app than `StableRules` say. None: as there; expressions are added to those there."""

    app: str  # its name, whole, as `clients.app_name` has it
    drop_billing_line: bool | None = None
    move_volatile_line: bool | None = None
    sort_tools: bool | None = None
    sort_keys: bool | None = None
    custom: str = ""
    move: str = ""


class StableRules(msgspec.Struct, frozen=True):
    """Which rules of `chat/stable.py` are applied to each chat before it is rendered."""

    drop_billing_line: bool = True
    freeze_clock: bool = True  # templates that ask for the time get the day's beginning
    move_volatile_line: bool = False
    sort_tools: bool = False
    sort_keys: bool = False
    custom: str = ""  # regular expression of text that is removed from the system message; "": none
    apps: tuple[str, ...] = ()  # those whose names contain one of these; (): all
    move: str = ""  # regular expression of text in system messages that goes to the last user message; "": none
    per_app: tuple[AppRules, ...] = ()  # also for apps that `apps` leaves out


class AdapterFile(msgspec.Struct, frozen=True):
    """A LoRA adapter that the worker loads."""

    id: str
    path: str
    scale: float  # where a request does not say
    default: bool = False  # used by requests that name no adapter
    problem: str = ""  # why it cannot be used: it is not loaded then


class AdapterInfo(msgspec.Struct, frozen=True):
    """What is known of an adapter of a loaded model."""

    id: str
    path: str
    scale: float
    default: bool
    problem: str = ""  # why it cannot be used; "" otherwise
    sha256: str = ""  # of its content; "" while it is not known
    size: int = 0  # bytes of its file


class LoraChoice(msgspec.Struct, frozen=True):
    """One of the adapters that a request wants: its `id`, or its place in the list, from 0."""

    id: str | int
    scale: float | None = None  # None: the adapter's own


class ControlVector(msgspec.Struct, frozen=True):
    """A control vector of a model: as configured, or (with `sha256`) as it is applied."""

    path: str
    scale: float
    first: int = 0  # layers that it is added to; as configured, 0: from 1 on, and to the last
    last: int = 0
    sha256: str = ""  # of its file's content


class LoadModel(Frame):
    """First frame to a worker: what to load. Sizes in bytes, counts in tokens; 0 means "decide"."""

    path: str
    alias: str
    ctx: int  # what one request may use
    pool: int  # cells of the context; 0: as much more than ctx as `memory` gives
    memory: int  # bytes that the pool of cells may take at most
    parallel: int  # sequences that may run at once; 0: what suits the model
    threads: int
    batch: int  # longest prefill call, a multiple of 64
    kv_type: str  # f16, bf16, f32, q8_0, q4_0, ...: of K, and of V where `kv_type_v` is ""
    flash_attention: bool
    gpu_layers: int
    chat_template: str  # path or text of a template that replaces the model's own; "" keeps it
    template_timeout: float  # seconds that rendering may take
    reuse: Literal["token", "exact", "off"]
    salt: str
    max_queue: int
    max_stall: float  # seconds that running streams may stand still for somebody's prefill
    probes: str = ""  # directory where outcomes of probes are kept; "": models are not probed
    explain: bool = True  # tell with each request how its prompt is made up, and where it left what was known
    stable: StableRules | None = None  # rules that keep prompts stable; None: none
    device: str = ""  # names of llama.cpp's devices, with commas between; "": all that there are
    flash_if_gpu: bool = False  # flash attention also if layers come to lie on a GPU
    replay: bool = True  # prompts that repeat what was generated are made of the tokens that were generated
    adapters: list[AdapterFile] = []
    kv_type_v: str = ""  # of V; "": as `kv_type`
    control_vectors: list[ControlVector] = []


class Message(msgspec.Struct, omit_defaults=True):
    """One message of a chat, as the template will see it. `content` is text or None."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""llama.cpp's names of its samplers, in the order in which llama-server applies them."""


class Sampling(msgspec.Struct, frozen=True):
    """Settings of llama.cpp's sampler chain; the defaults are llama-server's. Greedy: `temperature` 0."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = -1  # < 0: random
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False
    min_tokens: int = 0
    top_n_sigma: float = -1.0  # <= 0: off
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0  # 1 or 2: its version, in place of all that cuts candidates off
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # tokens of a repetition that cost nothing
    dry_penalty_last_n: int = 64  # < 0: the whole context
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    samplers: tuple[str, ...] = SAMPLERS  # those that are applied, in this order, and `infill`


class Constraint(msgspec.Struct, frozen=True):
    """What a reply must look like. `text`: the JSON schema as JSON, or the grammar; "" for `json_object`."""

    kind: Literal["json_object", "json_schema", "grammar"]
    text: str = ""
    param: str = "response_format"  # the request's field that it comes from


class Generate(Frame):
    """A request, the same for every dialect. Exactly one of `messages` and `prompt` is not None."""

    rid: str  # the reply's id
    messages: list[Message] | None
    prompt: str | list[int] | None
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    max_tokens: int  # < 0: until the context is full
    stop: list[str]
    sampling: Sampling
    stream: bool  # text frames as it comes; else one Finished with the text
    cache: bool = True  # False: neither look up nor keep
    salt: str = ""  # the request's own namespace, "" for the shared one
    priority: Literal["interactive", "normal", "background"] = "normal"
    client: str = ""  # whose fair share it is: an API key's name, or what else tells apps apart
    constraint: Constraint | None = None
    tool_choice: str = "auto"  # auto, none, required, or `=` and the name of the tool that must be called
    parallel_tool_calls: bool = True  # False: at most one call in a reply
    logprobs: int = -1  # >= 0: report each token's, and those of so many of the likeliest others
    suffix: str | None = None  # not None: fill the gap between `prompt`, a text, and this
    files: list[tuple[str, str]] = []  # with `suffix`: names and texts of other files, which stand before
    lora: list[LoraChoice] | None = None  # adapters; None: the model's default ones
    warming: bool = False  # computed ahead of its need: no app waits for it
    prompt_logprobs: int = -1  # >= 0: as `logprobs`, of the prompt's tokens, which are all computed for it
    most_prompt_logprobs: int = 0  # log-probabilities of these that may be told at most; 0: no bound
    allowed_tools: list[str] | None = None  # names of the `tools` that may be called; None: all
    strict_tools: list[str] = []  # names of those whose parameters are kept in every point, or refused


class Cancel(Frame):
    """The client left. Unknown or ended `rid`s are ignored."""

    rid: str


class UseStore(Frame):
    """A (new) connection to the store travels with this frame, as one descriptor."""


class Tokenize(Frame):
    """Answered by `Converted` with `tokens`. `content`: text, and token ids that are taken as they are."""

    rid: str
    content: list[str | int]
    add_special: bool  # a beginning-of-sequence token before the first text, where the model wants one
    parse_special: bool  # control tokens may be written in the text
    with_pieces: bool  # answer with each token's bytes too


class Detokenize(Frame):
    """Answered by `Converted` with `text`."""

    rid: str
    tokens: list[int]


class ApplyTemplate(Frame):
    """Answered by `Converted` with `text`: the prompt of a chat."""

    rid: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]


class DescribeTemplate(Frame):
    """Answered by `Converted`: `text` is the chat template, `pieces` are the texts of its BOS and EOS."""

    rid: str


class TokenizeRequest(Frame):
    """Answered by `Converted` with `tokens`: the prompt that the worker would compute for this request."""

    rid: str
    request: Generate


class Embed(Frame):
    """Answered by `Converted` with `vectors`, of length 1, and in `tokens` how many each input had."""

    rid: str
    inputs: list[str | list[int | str]]  # a text, or token ids and texts between them
    dimensions: int = 0  # of each vector; 0: as many as the model has
    truncate: bool = False  # what is too long loses its end, else it is refused


Conversion = Tokenize | Detokenize | ApplyTemplate | DescribeTemplate | TokenizeRequest | Embed


class SetLogLevel(Frame):
    """debug, info, warning or error, from now on."""

    level: str


class SetRules(Frame):
    """Rules for prompts that come from now on."""

    rules: StableRules


ToWorker = LoadModel | Generate | Cancel | UseStore | Stop | SetLogLevel | SetRules | Conversion


# ---------------------------------------------------------------------------------------------- worker -> daemon


class Loading(Frame):
    """Progress of loading the model, 0 to 1."""

    progress: float


class ModelInfo(msgspec.Struct, frozen=True):
    """What is known of a loaded model."""

    alias: str
    path: str
    arch: str
    description: str
    n_params: int
    size: int  # bytes of tensors
    n_vocab: int
    n_embd: int
    n_ctx_train: int
    n_ctx: int  # what one request may use
    n_pool: int  # cells of the context
    kv_bytes_per_token: float
    parallel: int
    threads: int
    has_template: bool
    cache_mode: Literal["blocks", "blocks with edges", "whole sequence", "off"]
    cache_reason: str  # why it is off, or not in blocks; "" otherwise
    namespace: dict[str, Any]  # the description; {} while the file's hash is not known
    exact: bool = False  # only whole blocks of the grid are reused
    least: int = 0  # tokens of a match that is worth anything
    mismatch: list[str] = []  # fields in which stored prefixes of the same file differ, none of which can be used
    adapters: list[AdapterInfo] = []
    control_vectors: list[ControlVector] = []  # as they are applied
    on_devices: dict[str, int] = {}  # bytes that it takes of devices' own memory, by their names


class Ready(Frame):
    """The model is loaded and warm; requests are served."""

    model: ModelInfo


class NamespaceKnown(Frame):
    """The model's content hash is known now, so look-ups start."""

    namespace: dict[str, Any]
    mismatch: list[str] = []  # as in ModelInfo
    adapters: list[AdapterInfo] = []  # as in ModelInfo, with their hashes


class Failure(Frame):
    """An error by class name of `errors.py`. With `rid`: of that request, which has ended. Without: the worker ends."""

    rid: str | None
    error: str
    message: str
    code: str | None = None
    param: str | None = None
    details: dict[str, Any] = {}


class Accepted(Frame):
    """The prompt was rendered, tokenised and fits. Sent before queueing; the daemon may start a stream now."""

    rid: str
    prompt_n: int


class SectionTokens(msgspec.Struct, frozen=True):
    """A part of a prompt, as its template has laid it out."""

    name: str  # system, tool NAME, message 3 (user), template
    tokens: int


class Finding(msgspec.Struct, frozen=True):
    """Where a prompt left the one that it resembles most, and why. Texts are of some dozens of characters."""

    cause: str  # a key of `explain.causes.CAUSES`
    place: str  # of which section
    token: int  # position of the first token that differs
    lead: str  # the text before it, in both
    before: str  # what stood there
    after: str  # what stands there now
    alike: int  # tokens behind it that are the same in both, roughly
    rule: str = ""  # the rule of `chat/stable.py` that would have kept it stable
    setting: str = "on"  # what that rule must be set to
    beside: bool = False  # another prompt begins more like this one, but has less in common with it
    until: int = 0  # position up to which both go on word for word behind a value that differs; 0: no value does


class Judged(msgspec.Struct, frozen=True):
    """A rule that was proposed for an app before, and whether it fits what that app sends now."""

    rule: str
    setting: str
    fits: bool


class Account(Frame):
    """What the worker knows of a prompt, sent once after `Accepted`. Nothing that a client is told."""

    rid: str
    sections: list[SectionTokens]
    resembles: bool  # a prompt like it was seen
    known: int  # leading tokens that were computed for that one, its reply included; 0: none, or not to the end
    known_prompt: int  # of these, in that one's prompt
    finding: Finding | None  # None: it goes on where that one ended, or resembles none
    rules: dict[str, int] = {}  # rule that was applied -> how often; with TOO_SLOW: that was not -> 1
    asked_no_cache: bool = False
    replayed: int = 0  # of the prompt's tokens, are the very ones that were generated
    gone: Gone | None = None  # where something of it was stored, and is not any more
    elsewhere: int = 0  # leading tokens that are stored, but under another namespace
    differences: list[str] = []  # how that one differs, in words
    reply: str = ""  # name of the message that has the other one's reply; "": none has it, or that is not known
    no_replay: bool = False  # what was generated is not known by its text (`cache.replay`)
    judged: list[Judged] = []  # what was proposed for its app, by all prompts that are remembered


class Progress(Frame):
    """Prefill of a request, in tokens: `reused` of `total` came from the cache, `done` are in the context."""

    rid: str
    reused: int
    done: int
    total: int


class CallPiece(msgspec.Struct):
    """A piece of a tool call. `id` and `name` stand in the first piece of a call only."""

    index: int  # which call of the reply, from 0
    arguments: str  # the next part of a JSON text
    id: str = ""
    name: str = ""
    written: str = ""  # in a reply that is not streamed, of a call that was cut short: all of it, as it was generated


class TokenLogprob(msgspec.Struct):
    """A token and its natural logarithm of probability, before any sampler; `top`: the likeliest ones'."""

    token: int
    piece: bytes
    logprob: float
    top: list[TokenLogprob] = []


class Delta(Frame):
    """Of a streaming request: whole characters, never part of a stop string."""

    rid: str
    text: str
    tokens: int  # tokens generated so far
    reasoning: str = ""  # the model's thoughts, which are not part of `text`
    calls: list[CallPiece] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []  # of all the prompt's tokens, in one frame; the first one's is NaN


class Timings(msgspec.Struct, frozen=True):
    """The contract's figures of one request; times in ms, counts in tokens."""

    cache_n: int  # prompt tokens whose computation was skipped
    prompt_n: int  # prompt tokens computed
    prompt_ms: float
    restore_ms: float
    queue_ms: float
    predicted_n: int
    predicted_ms: float
    cache_tiers: dict[str, int]  # tokens by tier: shared, hot, warm
    total_prompt_n: int
    logits_sha256: str = ""  # of the first token's logits; only where `HOMEPREFIXD_DEBUG_LOGITS=1`
    thought_n: int = 0  # of predicted_n, are thoughts with their marks


class GateDecision(msgspec.Struct, frozen=True):
    """How much of what the cache knew of a prompt was to be restored, and why. Counts in tokens.

    Seconds are those that were predicted; None while too little is measured. `reason`: a key of `explain.causes.GATE`.
    """

    known: int
    restored: int
    reason: str
    tiers: dict[str, int] = {}  # of `known`, where it lies
    load_s: float | None = None  # to restore all that is known
    compute_s: float | None = None  # to compute it
    disk_rate: float = 0.0  # bytes a second of one reader, as measured by the store; 0: not known
    prefill_rate: float = 0.0  # tokens a second of this prompt, as predicted; 0: not known


class Finished(Frame):
    """The last frame of a request that went well. `text` is the whole reply where `stream` was False, else ""."""

    rid: str
    reason: Literal["stop", "length", "cancelled", "tool_calls"]
    text: str
    stop: str | None  # the stop string that ended it
    timings: Timings
    reasoning: str = ""  # like `text`: whole where `stream` was False
    calls: list[CallPiece] = []  # likewise, one piece for each call
    logprobs: list[TokenLogprob] = []  # likewise
    stored: int = -1  # tokens of prompt and reply that the cache holds in whole blocks; -1: not told
    gate: GateDecision | None = None  # how much of what the cache knew was restored, and why; None: nothing was asked
    prompt_logprobs: list[TokenLogprob] = []  # as in `Delta`, where `stream` was False
    broken: int = 0  # of its calls have arguments that are no object: they broke off, and nobody may carry them out


class Heartbeat(Frame):
    """Once a second from the engine's own loop's state, so that a stuck engine can be told from a busy one."""

    steps: int  # grows with each step
    step_age: float  # seconds since the running llama_decode call began; 0 when idle
    running: int
    waiting: int
    cells_used: int
    cells: int
    counters: dict[str, float]  # sums since start: tokens and seconds of prefill, decode, restore, save; errors
    cells_shared: int = 0  # cells that a sequence did not need because it uses another's
    rates: dict[str, float] = {}  # as measured, see `engine/gate.py`; {} while too little is known
    retry_after: int = 0  # seconds after which one may be sent again that finds the queue full, as measured


class Converted(Frame):
    """The answer to a `Conversion`; its errors are `Failure`s."""

    rid: str
    text: str = ""
    tokens: list[int] = []
    pieces: list[bytes] = []
    vectors: list[bytes] = []  # float32, little-endian


FromWorker = (
    Loading
    | Ready
    | NamespaceKnown
    | Failure
    | Accepted
    | Progress
    | Delta
    | Finished
    | Heartbeat
    | Converted
    | Account
)
