"""What replies look like, for the description of the API: the fields that clients may count on. Dialects may send more.

Only shapes: they are made from, and checked against, what the dialects really send by the tests.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | int | None


class Error(msgspec.Struct):
    """OpenAI's form of errors."""

    error: ErrorObject


class AnthropicErrorObject(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    type: Literal["error"]
    error: AnthropicErrorObject


class OllamaError(msgspec.Struct):
    error: str


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage


class TextCompletion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class Response(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage


class AnthropicUsage(msgspec.Struct):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class PromptTokens(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class OllamaChat(msgspec.Struct):
    model: str
    created_at: str
    message: dict[str, Any]
    done: bool
    done_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None


class OllamaText(msgspec.Struct):
    model: str
    created_at: str
    response: str
    done: bool
    done_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None


class OllamaEmbedded(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    embedding: list[float]


class OllamaVersion(msgspec.Struct):
    version: str


class OllamaModel(msgspec.Struct):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]


class OllamaModels(msgspec.Struct):
    models: list[OllamaModel]


class OllamaShown(msgspec.Struct):
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class Health(msgspec.Struct):
    status: str
    version: str


class Prompt(msgspec.Struct):
    prompt: str


class Tokens(msgspec.Struct):
    tokens: list[Any]


class Content(msgspec.Struct):
    content: str


class Prefixes(msgspec.Struct):
    prefixes: list[dict[str, Any]]
    total: int


class Purged(msgspec.Struct):
    nodes: int
    bytes: int


class Verified(msgspec.Struct):
    nodes: int
    bytes: int
    damaged: int
    removed: int
    problems: list[str]
    seconds: float
    complete: bool
