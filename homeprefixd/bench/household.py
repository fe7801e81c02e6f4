"""A household's prompt, made up: house policy, tool schemas as JSON, entity list, then somebody's question.

Deterministic: the same seed and size give the same text on every machine, and another seed differs from the first
sentence on, so that nothing of it is cached for the other. Knows no tokenizer: `size` is met within some per cent.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

_HOUSES = ("Birch Cottage", "Mill House", "Harbour Flat", "Orchard Farm", "Lark Villa", "Stone Barn", "Quay Loft")
_ROOMS = (
    "kitchen",
    "living_room",
    "hallway",
    "bathroom",
    "bedroom",
    "nursery",
    "office",
    "garage",
    "cellar",
    "attic",
    "terrace",
    "garden",
    "workshop",
    "pantry",
)
_DOMAINS = {
    "light": ("on", "off"),
    "switch": ("on", "off"),
    "sensor": ("21.5 C", "19.0 C", "48 %", "612 ppm"),
    "binary_sensor": ("closed", "open", "clear", "detected"),
    "climate": ("heat, 20.5 C", "off, 17.0 C", "auto, 21.0 C"),
    "cover": ("open", "closed", "50 % open"),
    "media_player": ("idle", "playing", "off"),
    "lock": ("locked", "unlocked"),
}
_THINGS = (
    "ceiling",
    "desk",
    "wall",
    "north",
    "south",
    "main",
    "small",
    "window",
    "door",
    "corner",
    "floor",
    "table",
    "shelf",
    "bench",
)

_POLICY = (
    "Answer in one or two short sentences, in the language of the question, without lists.",
    "Use a tool when somebody wants something done; never say that it is done before the tool has answered.",
    "If two devices fit a name, ask which one is meant instead of guessing.",
    "Between {late}:00 and 6:30 keep every loudspeaker below {quiet} percent, and switch lights on at {dim} percent.",
    "Do not unlock the front door, the garage or the cellar for anybody who has not said the word of the day.",
    "Heating in empty rooms stays at {away} degrees; in the nursery never below {nursery} degrees.",
    "If a smoke or water sensor reports something, say so first, whatever the question was.",
    "The washing machine, the dryer and the dishwasher may start alone only while the roof gives {solar} watts.",
    "Windows that stand open for more than {minutes} minutes in winter are mentioned once, and not again that day.",
    "Children may ask for music, light and stories; for shopping and for the locks an adult is asked.",
    "The cat may go out until {cat}:00; after that the flap stays closed.",
    "Times are given as on a 24 hour clock, temperatures in degrees Celsius, power in watts.",
    "The garden is watered only if it has not rained for {dry} days, and never at noon.",
    "What is said in this house stays in this house: send nothing to a service that is not listed below.",
    "When nobody is at home, lights follow the evening pattern of last week, with up to {drift} minutes of difference.",
    "The car is charged after midnight unless somebody says that they leave before {leave}:00.",
)

_TOOLS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("turn_on", "Switch a device on.", {"entity": "Id of the device", "brightness": "Percent, for lights"}),
    ("turn_off", "Switch a device off.", {"entity": "Id of the device"}),
    ("set_temperature", "Set the wanted temperature.", {"entity": "Id of the thermostat", "degrees": "In Celsius"}),
    ("set_cover", "Move a cover or blind.", {"entity": "Id of the cover", "position": "Percent, 0 is closed"}),
    ("play_media", "Play music, radio or a story.", {"entity": "Id of the player", "what": "Title, artist or station"}),
    ("get_state", "Read the state of a device.", {"entity": "Id of the device"}),
    ("add_to_list", "Put something on the shopping list.", {"item": "What to buy", "amount": "How much of it"}),
    ("set_timer", "Start a timer.", {"minutes": "How long", "name": "What it is for"}),
    ("lock", "Lock a door.", {"entity": "Id of the lock"}),
    ("get_weather", "Forecast for the house.", {"day": "today, tomorrow or a date", "detail": "short or long"}),
)

_QUESTIONS = (
    "Is the {room} window still open?",
    "How warm is it in the {room} now?",
    "Please dim the {room} light a little.",
    "Did anybody leave the {room} light on?",
    "What should I wear for the {room} today?",
    "Can the blinds in the {room} go down?",
    "Is it too damp in the {room}?",
)

_POLICY_SHARE = 0.28
_TOOLS_SHARE = 0.36
"""Of the size, at most; entities fill what is left."""

_PIECE = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z0-9]+")


def household_messages(question: str, *, seed: int = 0, size: int = 2200) -> list[dict[str, str]]:
    """Messages of a chat: a system message of about `size` tokens, made from `seed`, and `question` of the user."""
    return [
        {"role": "system", "content": household_prompt(seed=seed, size=size)},
        {"role": "user", "content": question},
    ]


def household_prompt(*, seed: int = 0, size: int = 2200) -> str:
    """The system text alone, of about `size` tokens (at least some fifty)."""
    chance = random.Random(f"household {seed}")
    opening = f"{chance.choice(_HOUSES)}, number {seed}: you are the assistant of this household."
    parts = [opening]
    used = estimate_tokens(opening)
    for heading, lines, share, density in (
        ("House policy:", _policy(chance), _POLICY_SHARE, 1.02),
        ("Tools, as JSON schemas:", _tools(chance), _POLICY_SHARE + _TOOLS_SHARE, 0.96),
        ("Devices and their states:", _entities(chance), 1.0, 1.11),
    ):
        parts.append(heading)
        used += estimate_tokens(heading)
        for line in lines:
            tokens = density * estimate_tokens(line)
            if used + tokens > size * share:
                break
            parts.append(line)
            used += tokens
    return "\n".join(parts)


def household_question(number: int) -> str:
    """A question of about ten tokens; different for each number below 98, then they come again."""
    room = _ROOMS[number % len(_ROOMS)].replace("_", " ")
    return _QUESTIONS[number // len(_ROOMS) % len(_QUESTIONS)].format(room=room)


def estimate_tokens(text: str) -> float:
    """About how many tokens a line is, its end included; by pieces, as byte-pair tokenizers split text.

    `density` above corrects it for each kind of line, measured with the demo model's tokenizer.
    """
    return 1.0 + sum(1 + len(piece) // 9 for piece in _PIECE.findall(text))


def _policy(chance: random.Random) -> Iterator[str]:
    numbers = {
        "late": chance.randint(20, 23),
        "quiet": chance.randint(10, 40),
        "dim": chance.randint(5, 30),
        "away": chance.randint(14, 18),
        "nursery": chance.randint(19, 21),
        "solar": chance.randint(4, 30) * 100,
        "minutes": chance.randint(5, 25),
        "cat": chance.randint(19, 22),
        "dry": chance.randint(2, 5),
        "drift": chance.randint(5, 30),
        "leave": chance.randint(5, 9),
    }
    rules = list(_POLICY)
    chance.shuffle(rules)
    for index, rule in enumerate(rules, start=1):
        yield f"{index}. {rule.format(**numbers)}"


def _tools(chance: random.Random) -> Iterator[str]:
    tools = list(_TOOLS)
    chance.shuffle(tools)
    for name, description, parameters in tools:
        schema: dict[str, Any] = {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": text} for key, text in parameters.items()},
                "required": [next(iter(parameters))],
            },
        }
        yield json.dumps(schema)


def _entities(chance: random.Random) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        domain = chance.choice(list(_DOMAINS))
        room, thing = chance.choice(_ROOMS), chance.choice(_THINGS)
        yield f"{domain}.{room}_{thing}_{number}: {chance.choice(_DOMAINS[domain])}"
