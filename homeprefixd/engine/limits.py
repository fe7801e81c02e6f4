"""What llguidance may spend on a grammar. Used by the process that tries grammars and by the one that uses them.

Loads llguidance and nothing else.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits


def parser_limits() -> LLParserLimits:
    """Bounds of one grammar: of building it, and of each mask (some tens of milliseconds at most)."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def validate(grammar: str) -> str:
    """What is wrong with it; "" if nothing is."""
    return str(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar), None, limits=parser_limits()))
