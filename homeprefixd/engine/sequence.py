"""One request on its way through the engine: what it asks, where it is, what it has cost.

State only; `scheduler.py` moves it. Times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..chat.stream import TextStream
from ..frames.store import PlanNode
from ..frames.worker import GateDecision, Sampling, Timings
from ..lora import Chosen, Space
from ..prefix.blocks import BLOCK_TOKENS, BlockKey, block_key, to_le
from .context import TokenArray
from .likelihood import PromptLogprobs
from .sampling import Sampler
from .store import Lookup

if TYPE_CHECKING:
    from .emission import Reply  # which looks at sequences
    from .replay import Worded


KEY = "key"
"""First word of `Request.client` where it is an API key; its name follows."""


class Phase(enum.Enum):
    WAITING = "waiting"  # for a look-up, a sequence id or cells
    RESTORING = "restoring"  # blocks come in
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(frozen=True)
class Request:
    """A prompt that fits, ready to be queued. `max_tokens` < 0: until the context is full."""

    rid: str
    tokens: list[int]
    max_tokens: int
    stops: list[str]
    sampling: Sampling
    stream: bool
    cache: bool
    salt: str
    arrived: float
    priority: str = "normal"  # interactive, normal, background
    client: str = ""  # whose share it is
    worded: Worded | None = None  # the prompt's text; None: what is generated after it is not remembered
    points: tuple[tuple[int, str], ...] = ()  # positions from which others may go on, with their kind; see `points.py`
    lora: Chosen = ()
    prompt_logprobs: int = -1  # >= 0: those of the prompt's tokens are wanted, and of so many of the likeliest

    @property
    def space(self) -> Space:
        """Where its blocks are."""
        return Space(self.salt, self.lora)

    @property
    def owner(self) -> str:
        """Name of the API key that asks; "" where none is asked for."""
        kind, _, name = self.client.partition(" ")
        return name if kind == KEY else ""


@dataclass(eq=False)
class Sequence:
    """A request in the engine. Counts are tokens."""

    request: Request
    tokens: list[int]  # the prompt, then what was generated; the last one may not be in the context yet
    text: TextStream
    lookup: Lookup | None = None
    phase: Phase = Phase.WAITING
    told: bool = False  # its client knows of its end
    seq_id: int = -1
    n_past: int = 0  # in the context
    generated: int = 0
    sampler: Sampler | None = None
    parts: list[str] = field(default_factory=list)  # text, where it is not streamed
    reply: Reply | None = None  # what it wants beyond text
    prompt_logprobs: PromptLogprobs | None = None  # where they are wanted

    # reuse
    plan: tuple[PlanNode, ...] | None = None
    next_node: int = 0
    restored: int = 0  # of n_past, came from the cache at the last admission
    stalled_since: float = 0.0
    no_lookup: bool = False  # something was wrong with what the cache gave: compute
    lookup_since: float = 0.0
    saved_before: float = 0.0  # tokens that had been saved when its look-up began
    behind: bool = False  # waits for blocks that another computes
    urgency: float = 0.0  # tokens by which it is ahead: its own class, or that of one that waits for its blocks
    displaced: int = 0  # how often it made way for a more urgent one
    saved: int = 0  # of n_past, in whole blocks, exported or restored
    no_save: bool = False
    aligned: bool = True  # nobody else had cells while this one had
    grid_until: int = 0  # so far computed on the grid
    unsaved_cost: float = 0.0  # seconds spent on what is not saved yet
    points: dict[int, str] = field(default_factory=dict)  # where a prefill call must end, and why

    # what is reported
    cached: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    admitted: float = 0.0
    restore_done: float = 0.0
    first_token: float = 0.0
    started: bool = False  # admitted once: figures of later admissions are not reported
    logits_sha256: str = ""
    gate: GateDecision | None = None  # of its first admission

    _array: TokenArray | None = None
    _le: bytes = b""
    _keys: list[BlockKey] = field(default_factory=list)

    @property
    def n_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def must_compute(self) -> bool:
        """Are logits of the prompt's tokens missing? Nothing that is known of it helps then."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.complete

    @property
    def matched(self) -> int:
        """Tokens that the plan promises."""
        return sum(node.use for node in self.plan or ())

    def array(self) -> TokenArray:
        """`tokens` as int32, made anew when they have grown."""
        if self._array is None or len(self._array) != len(self.tokens):
            self._array = np.array(self.tokens, np.int32)
        return self._array

    def le(self) -> bytes:
        """`tokens` as little-endian u32."""
        if len(self._le) != 4 * len(self.tokens):
            self._le = to_le(self.tokens)
        return self._le

    def key_before(self, start: int, root: bytes) -> bytes:
        """Key of the node that ends at `start`, a multiple of the block size."""
        while len(self._keys) < start // BLOCK_TOKENS:
            at = len(self._keys) * BLOCK_TOKENS
            parent = self._keys[-1] if self._keys else root
            self._keys.append(block_key(parent, to_le(self.tokens[at : at + BLOCK_TOKENS])))
        return self._keys[start // BLOCK_TOKENS - 1] if start else root

    def forget_state(self) -> None:
        """Its cells are gone; what it has generated is kept."""
        self.n_past = self.restored = self.saved = self.grid_until = self.next_node = 0
        self.unsaved_cost = 0.0
        self.aligned = True

    def timings(self, now: float) -> Timings:
        arrived = self.request.arrived
        admitted = self.admitted or now
        restored = self.restore_done or admitted
        first = self.first_token or now
        return Timings(
            cache_n=self.cached,
            prompt_n=self.n_prompt - self.cached,
            prompt_ms=max(0.0, first - restored) * 1e3,
            restore_ms=(restored - admitted) * 1e3,
            queue_ms=(admitted - arrived) * 1e3,
            predicted_n=self.generated,
            predicted_ms=max(0.0, now - first) * 1e3,
            cache_tiers=dict(self.tiers),
            total_prompt_n=self.n_prompt,
            logits_sha256=self.logits_sha256,
        )
