"""From a Generate frame to a queued sequence: render, tokenise, check that it fits. Not on the engine's thread."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..channel import ChannelClosedError
from ..chat.boundaries import boundaries
from ..chat.prompt import PromptBuilder
from ..chat.stream import TextStream
from ..errors import BusyError, ContextOverflowError, HomeprefixdError, RequestError
from ..frames import Frame
from ..frames.worker import (
    Accepted,
    AdapterInfo,
    ApplyTemplate,
    Conversion,
    Converted,
    Detokenize,
    Generate,
    Tokenize,
    TokenizeRequest,
)
from ..lora import Chosen, Space, choose
from .account import Accountant
from .bindings import Model
from .failures import failure_of
from .infill import fill_prompt
from .likelihood import PromptLogprobs
from .points import points_of
from .replay import Replay, Worded, is_repeating
from .sampling import Sampler, check_sampling, takes_long
from .scheduler import Engine
from .sequence import Request
from .sequence import Sequence as RunningSequence
from .shaping import Shaper
from .turns import Turns

_SUSPICIOUS = 16
"""Characters per token of context beyond which a prompt's length is looked at before it is tokenised."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Prepared:
    """A request with all but its form and its sampler."""

    generate: Generate
    arrived: float
    rules: dict[str, int]  # of those that keep prompts stable: how often each was applied
    text: str  # the prompt, "" where it has none
    worded: Worded
    points: tuple[tuple[int, str], ...]
    lora: Chosen


class Intake:
    """One thread prepares requests in order; those whose form or sampler may take seconds to be made go on to another,
    where accounts take turns. `put` and `cancel` never wait for them.

    `ctx`: tokens that one request may use. `emit` may raise ChannelClosedError: the engine ends then.
    """

    def __init__(
        self,
        model: Model,
        prompts: PromptBuilder,
        engine: Engine,
        emit: Callable[[Frame], None],
        ctx: int,
        max_queue: int,
        shaper: Shaper,
        stable: Callable[[Generate], tuple[Generate, dict[str, int]]] = lambda generate: (generate, {}),
        accountant: Accountant | None = None,
        points: bool = False,
        replay: Replay | None = None,
        adapters: Sequence[AdapterInfo] = (),
    ) -> None:
        """`stable`: the rules that keep prompts stable, see `chat/stable.py`. `accountant` None: nobody asks.
        `points`: the model can be resumed at certain positions only, so those are looked for. `replay` None: prompts
        are always tokenised.
        """
        self._replay = replay
        self._adapters = adapters
        self._stable, self._accountant, self._points = stable, accountant, points
        self._model, self._prompts, self._engine, self._emit = model, prompts, engine, emit
        self._shaper = shaper
        self._ctx, self._max_queue = ctx, max_queue
        self._queue: queue.SimpleQueue[tuple[Generate, float]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[str, bool] = {}  # rid of what is not queued in the engine yet: was it cancelled?
        self._turns: Turns[_Prepared] = Turns(shaper.is_known)
        self._threads = [
            threading.Thread(target=self._run, name="intake", daemon=True),
            threading.Thread(target=self._run_turns, name="constraints", daemon=True),
        ]
        self._conversions: queue.SimpleQueue[Conversion] = queue.SimpleQueue()
        self._converter = threading.Thread(target=self._run_conversions, name="conversions", daemon=True)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self._converter.start()

    def put(self, generate: Generate) -> None:
        """Take a request; whatever is wrong with it is told by a Failure frame."""
        with self._lock:
            full = len(self._pending) >= self._max_queue
            if not full:
                self._pending[generate.rid] = False
        if full:
            error = BusyError(
                f"{self._max_queue} requests are waiting already. Send it again later, or raise `model.max_queue`.",
                retry_after=self._engine.retry_after(),
            )
            self._emit(failure_of(generate.rid, error))
            return
        self._queue.put((generate, time.perf_counter()))

    def cancel(self, rid: str) -> None:
        with self._lock:
            if rid in self._pending:
                if self._turns.drop(rid):  # nothing is made for nobody
                    del self._pending[rid]
                else:
                    self._pending[rid] = True
                return
        self._engine.cancel(rid)

    def _run(self) -> None:
        while True:
            generate, arrived = self._queue.get()
            if not self._attempt(generate.rid, functools.partial(self._begin, generate, arrived)):
                return

    def _run_turns(self) -> None:
        while True:
            prepared = self._turns.take()
            began = time.monotonic()
            if not self._attempt(prepared.generate.rid, functools.partial(self._queue_up, prepared)):
                return
            self._turns.spent(prepared.generate.client, time.monotonic() - began)

    def _attempt(self, rid: str, step: Callable[[], bool]) -> bool:
        """Do a step of a request's, which says whether this was the last one here. False: nobody listens any more."""
        done = True
        try:
            try:
                done = step()
            except ChannelClosedError:
                raise
            except Exception as error:
                if not isinstance(error, HomeprefixdError):
                    logger.exception("request %s could not be prepared", rid)
                self._emit(failure_of(rid, error))
        except ChannelClosedError:
            self._engine.quit()
            return False
        finally:
            if done:
                with self._lock:
                    cancelled = self._pending.pop(rid, False)
                if cancelled:
                    self._engine.cancel(rid)
        return True

    def _begin(self, generate: Generate, arrived: float) -> bool:
        """All that takes no long time; what does waits for its turn then."""
        prepared = self._prepare(generate, arrived)
        generate = prepared.generate
        form = self._shaper.form(generate, prepared.text)
        if takes_long(generate.sampling):
            form = b""
        elif not form or self._shaper.is_known(form):
            return self._queue_up(prepared)
        with self._lock:
            if self._pending.get(generate.rid):
                return True  # cancelled
            self._turns.put(generate.rid, generate.client, form, prepared)
        return False

    def convert(self, conversion: Conversion) -> None:
        """Text to tokens and the like, for its own sake. On a thread of its own: no prompt waits for it."""
        self._conversions.put(conversion)

    def _run_conversions(self) -> None:
        while True:
            conversion = self._conversions.get()
            try:
                try:
                    answer: Frame = self._convert(conversion)
                except Exception as error:
                    if not isinstance(error, HomeprefixdError):
                        logger.exception("%s could not be answered", conversion.rid)
                    answer = failure_of(conversion.rid, error)
                self._emit(answer)
            except ChannelClosedError:
                return  # the other thread sees it too, and ends the engine

    def _convert(self, conversion: Conversion) -> Converted:
        rid = conversion.rid
        match conversion:
            case Tokenize():
                tokens = self._tokens_of_mixture(conversion)
                pieces = self._model.pieces(tokens) if conversion.with_pieces else []
                return Converted(rid, tokens=tokens, pieces=pieces)
            case Detokenize():
                self._model.check_tokens(conversion.tokens)
                data = b"".join(self._model.pieces(conversion.tokens))
                return Converted(rid, text=data.decode(errors="replace"))
            case TokenizeRequest():
                # who names an adapter that is not there is told so
                space = Space(conversion.request.salt, choose(self._adapters, conversion.request.lora))
                return Converted(rid, tokens=self._prompt(self._stable(conversion.request)[0], space)[1].tokens)
            case ApplyTemplate():
                return Converted(
                    rid, self._prompts.render(conversion.messages, conversion.tools, conversion.template_kwargs)
                )
            case _:
                return Converted(
                    rid, self._prompts.source, pieces=[self._prompts.bos.encode(), self._prompts.eos.encode()]
                )

    def _tokens_of_mixture(self, wanted: Tokenize) -> list[int]:
        """As llama-server: special tokens only before what comes first, and that must be text."""
        tokens: list[int] = []
        for index, item in enumerate(wanted.content):
            if isinstance(item, int):
                self._model.check_tokens([item])
                tokens.append(item)
            else:
                add_bos = wanted.add_special and index == 0
                tokens += self._model.tokenize(item, add_bos=add_bos, parse_special=wanted.parse_special)
        return tokens

    def _prepare(self, generate: Generate, arrived: float) -> _Prepared:
        self._engine.check_room()
        check_sampling(generate.sampling, self._model.n_vocab)
        lora = choose(self._adapters, generate.lora)
        generate, rules = self._stable(generate)
        text, worded = self._prompt(generate, Space(generate.salt, lora))
        self._check_fit(len(worded.tokens))
        _check_told(generate, len(worded.tokens))
        points = self._points_of(generate, text, worded) if self._points else ()
        return _Prepared(generate, arrived, rules, text, worded, points, lora)

    def _queue_up(self, prepared: _Prepared) -> bool:
        """Make its form and, not while others are served, its sampler; then the engine has it."""
        self._engine.check_room()  # it may have waited
        generate, tokens = prepared.generate, prepared.worded.tokens
        reply = self._shaper.reply(generate, prepared.text)
        sampler = None
        if takes_long(generate.sampling):
            sampler = Sampler(self._model, generate.sampling, self._ctx)
            sampler.accept_prompt(tokens)
        request = Request(
            rid=generate.rid,
            tokens=tokens,
            max_tokens=generate.max_tokens,
            stops=generate.stop,
            sampling=generate.sampling,
            stream=generate.stream,
            cache=generate.cache,
            salt=generate.salt,
            arrived=prepared.arrived,
            priority=generate.priority,
            client=generate.client,
            points=prepared.points,
            worded=prepared.worded if prepared.text and self._replay is not None else None,
            lora=prepared.lora,
        )
        self._emit(Accepted(rid=generate.rid, prompt_n=len(tokens)))
        sequence = RunningSequence(request, list(tokens), TextStream(generate.stop), sampler=sampler, reply=reply)
        if generate.prompt_logprobs >= 0:
            piece = functools.partial(self._model.piece, special=True)
            sequence.prompt_logprobs = PromptLogprobs(tokens, generate.prompt_logprobs, piece)
        self._engine.submit(sequence)
        if self._accountant is not None:
            self._accountant.take(generate, tokens, prepared.rules, prepared.lora, prepared.worded.replayed)
        return True

    def _prompt(self, generate: Generate, space: Space) -> tuple[str, Worded]:
        """As text ("" where it was given as tokens, or has a gap to fill) and as tokens."""
        text = ""
        if (generate.messages is None) == (generate.prompt is None):
            raise RequestError("Exactly one of `messages` and `prompt` must be given.")
        if generate.messages is not None:
            text = self._prompts.render(generate.messages, generate.tools, generate.template_kwargs)
            worded = self._words(text, generate, space)
        elif isinstance(generate.prompt, str) and generate.suffix is not None:
            room = self._ctx // 2 if generate.max_tokens < 0 else self._ctx - generate.max_tokens - 8
            for part in (generate.prompt, generate.suffix, *(text for _, text in generate.files)):
                self._check_length(part)
            filled = fill_prompt(self._model, generate.prompt, generate.suffix, generate.files, room)
            worded = Worded(b"", filled)
        elif isinstance(generate.prompt, str):
            text = generate.prompt
            worded = self._words(text, generate, space)
        else:
            worded = Worded(b"", list(generate.prompt or []))
            self._model.check_tokens(worded.tokens)
        if not worded.tokens:
            raise RequestError("The prompt is empty: it must have at least one token.", param="prompt")
        return text, worded

    def _words(self, text: str, generate: Generate, space: Space) -> Worded:
        self._check_length(text)
        if self._replay is None:
            return Worded(b"", self._model.tokenize(text))
        return self._replay.words(text, space, repeating=generate.cache and is_repeating(generate))

    def _points_of(self, generate: Generate, text: str, worded: Worded) -> tuple[tuple[int, str], ...]:
        """Where others may go on from; what goes wrong costs a point, never the request. `text`: the prompt."""

        def tokenize(beginning: str) -> list[int]:
            if self._replay is None or not worded.stretches:
                return self._tokenize(beginning)
            return self._replay.beginning(worded, beginning)

        try:
            messages, found = generate.messages, []
            if messages is not None:
                found = boundaries(self._prompts, messages, generate.tools, generate.template_kwargs, text)
            return points_of(worded.tokens, found, tokenize)
        except HomeprefixdError as error:
            logger.info("request %s: no points were found: %s", generate.rid, error)
            return ()

    def _tokenize(self, text: str) -> list[int]:
        self._check_length(text)
        return self._model.tokenize(text)

    def _check_length(self, text: str) -> None:
        """Refuses what cannot fit by its length alone: megabytes take llama.cpp seconds."""
        if len(text) >= _SUSPICIOUS * self._ctx:
            bound = self._model.text_bound
            if bound is not None:
                self._check_fit(bound.least_tokens(text), "at least ")

    def _check_fit(self, count: int, at_least: str = "") -> None:
        if count >= self._ctx:
            raise ContextOverflowError(
                f"The prompt has {at_least}{count} tokens, which exceeds the available context size of {self._ctx}"
                " (reply included): shorten it, or raise `model.ctx` (`--ctx`).",
                n_prompt_tokens=count,
                n_ctx=self._ctx,
            )


def _check_told(generate: Generate, count: int) -> None:
    """Refuses what would make a reply of many megabytes: log-probabilities of a prompt of `count` tokens."""
    wanted, most = count * (1 + generate.prompt_logprobs), generate.most_prompt_logprobs
    if wanted > most > 0:
        raise RequestError(
            f"`echo` with `logprobs` {generate.prompt_logprobs} would tell {wanted} log-probabilities of the prompt's"
            f" {count} tokens, where {most} may be told for each reply: lower `logprobs`, shorten the prompt, or ask"
            " for fewer replies at once.",
            param="logprobs",
            code="out_of_range",
        )
