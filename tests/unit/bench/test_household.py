"""The made-up household: deterministic, as long as asked, and different from its first sentence on."""

from __future__ import annotations

import hashlib
import json

import pytest

from homeprefixd.bench.household import estimate_tokens, household_messages, household_prompt, household_question


def test_messages() -> None:
    system, user = household_messages("Is it warm?", seed=3)
    assert system == {"role": "system", "content": household_prompt(seed=3)}
    assert user == {"role": "user", "content": "Is it warm?"}


def test_the_same_on_every_machine() -> None:
    """Stored prefixes and published figures depend on the very bytes."""
    digest = hashlib.sha256(household_prompt(seed=0, size=2200).encode()).hexdigest()
    assert digest[:16] == "f775c71a4942c8f5"


def test_another_seed_shares_no_block() -> None:
    prompts = [household_prompt(seed=seed) for seed in range(50)]
    for number, prompt in enumerate(prompts):
        for other in prompts[:number]:
            differs = next(index for index, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b)
            assert estimate_tokens(prompt[:differs]) < 32


@pytest.mark.parametrize("size", [100, 300, 1000, 2200, 8000])
def test_size(size: int) -> None:
    """By the estimate, which is within 1 % of the demo model's tokenizer for these texts."""
    tokens = sum(estimate_tokens(line) for line in household_prompt(size=size).splitlines())
    assert 0.85 * size < tokens < 1.05 * size


def test_it_has_policy_tools_and_entities() -> None:
    lines = household_prompt().splitlines()
    tools = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(tools) >= 8
    assert {tool["name"] for tool in tools} >= {"turn_on", "get_state"}
    assert lines[1] == "House policy:"
    assert lines[2].startswith("1. ")
    assert sum("_" in line and ": " in line and not line.startswith("{") for line in lines) >= 60


def test_questions_differ() -> None:
    questions = [household_question(number) for number in range(98)]
    assert len(set(questions)) == 98
    assert all(4 < estimate_tokens(question) < 14 for question in questions)
