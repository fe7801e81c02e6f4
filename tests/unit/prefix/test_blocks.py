"""How a prefix is named."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from homeprefixd.prefix.blocks import (
    BLOCK_TOKENS,
    MODEL_NAME,
    block_key,
    chain,
    common_tokens,
    from_le,
    namespace_of,
    swap,
    to_le,
)

tokens_strategy = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def test_a_namespace_is_its_description_and_not_the_models_name() -> None:
    description = {"model_sha256": "ab", "kv_type": "f16", "rope": {"scale": 1.0}}
    key = namespace_of(description)
    assert len(key) == 32
    assert namespace_of(dict(reversed(description.items()))) == key
    assert namespace_of({**description, MODEL_NAME: "kitchen"}) == key
    assert namespace_of({**description, "kv_type": "q8_0"}) != key
    assert namespace_of({**description, "rope": {"scale": 2.0}}) != key


@given(tokens_strategy)
def test_the_chain_names_everything_before(tokens: list[int]) -> None:
    root = namespace_of({})
    keys = chain(root, to_le(tokens))
    assert len(keys) == len(tokens) // BLOCK_TOKENS
    for index, key in enumerate(keys):
        parent = keys[index - 1] if index else root
        assert key == block_key(parent, to_le(tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]))
    for index in range(len(keys)):
        changed = list(tokens)
        changed[index * BLOCK_TOKENS] ^= 1
        others = chain(root, to_le(changed))
        assert others[:index] == keys[:index]
        assert not set(others[index:]) & set(keys)


@given(tokens_strategy, tokens_strategy)
def test_byte_orders_and_common_beginnings(a: list[int], b: list[int]) -> None:
    assert from_le(to_le(a)) == a
    assert swap(swap(to_le(a))) == to_le(a)
    assert (swap(to_le(a)) < swap(to_le(b))) == (a < b)
    expected = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    assert common_tokens(to_le(a), to_le(b)) == expected
    assert common_tokens(to_le(a), to_le(a + b)) == len(a)
