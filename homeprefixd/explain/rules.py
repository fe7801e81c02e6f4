"""What the rules of `[stable]` make of two prompts: whether one came into force between them, and whether one helps.

Pure. To see what came into force the rules of now are tried on the prompt of then, and those of then on that of now: if
either makes the two go on alike for longer, it was the rule. One that shall help is tried on both.
"""

from __future__ import annotations

import json

import msgspec

from ..chat import stable
from ..frames.worker import Generate, Sampling, StableRules
from .prompt import Prompt, common_length
from .proposal import Proposal
from .reordered import canonical


def rules_behind(
    before: Prompt, after: Prompt, was: StableRules, now: StableRules, *, client: str, cause: str, place: str
) -> list[str]:
    """Names of the rules by which `after` differs from `before` at a place (`Difference.part`); [] if it is none of
    them. Both prompts are as the rules left them.
    """
    was, now = stable.for_client(was, client), stable.for_client(now, client)
    names = [name for name in msgspec.structs.asdict(now) if getattr(was, name) != getattr(now, name)]
    if not names:
        return []
    if cause == "template_clock":
        return ["freeze_clock"] if "freeze_clock" in names else []
    if before.messages is None or after.messages is None:
        return []
    plain = _agreement(before, after, place)
    for prompt, other, rules in ((before, after, now), (after, before, was)):
        under, counts = _under(prompt, rules, client)
        applied = [name for name in counts if name in names]
        if applied and _agreement(under, other, place) > plain:
            return applied
    return []


def helps(rule: str, before: Prompt, after: Prompt) -> bool:
    """Whether a rule that sorts tools or their keys leaves less that differs. Order that it cannot mend (of tools
    without a name, or of one name) is not mended.
    """
    if before.messages is None or after.messages is None:
        return False
    rules = msgspec.structs.replace(StableRules(drop_billing_line=False, freeze_clock=False), **{rule: True})
    (old, changed), (new, also) = (_under(prompt, rules, "") for prompt in (before, after))
    if not changed and not also:
        return False
    if rule == "sort_tools":
        tools = [[canonical(tool) for tool in prompt.tools] for prompt in (old, new)]
        if tools[0] != tools[1] and sorted(tools[0]) == sorted(tools[1]):
            return False
    return _differing(_tools(old), _tools(new)) < _differing(_tools(before), _tools(after))


def in_force(proposal: Proposal, rules: StableRules, client: str) -> bool:
    """Whether a client's prompts are changed by a rule already: it is of no more help then."""
    value = getattr(stable.for_client(rules, client), proposal.rule)
    return value if isinstance(value, bool) else proposal.setting in (value or "")


def _differing(a: str, b: str) -> int:
    """Characters of the longer one, from the first that differs on."""
    return max(len(a), len(b)) - common_length(a, b)


def _under(prompt: Prompt, rules: StableRules, client: str) -> tuple[Prompt, dict[str, int]]:
    messages, tools = list(prompt.messages or ()), list(prompt.tools) or None
    asked = Generate("", messages, None, tools, {}, 1, [], Sampling(), False, client=client)
    changed, counts = stable.apply(rules, asked)
    return Prompt("", changed.messages, changed.tools or ()), counts


def _agreement(a: Prompt, b: Prompt, place: str) -> int:
    """Characters that the beginnings of two prompts share, of what stands at the place: tools, or system messages."""
    text = _tools if "tool" in place else _system
    return common_length(text(a), text(b))


def _tools(prompt: Prompt) -> str:
    return json.dumps(list(prompt.tools), default=str)


def _system(prompt: Prompt) -> str:
    """With an end that no other has: a message may have gone."""
    return "\0".join(message.content or "" for message in prompt.messages or () if message.role == "system") + "\0\0"
