"""What the worker tells of each prompt: its sections, what it resembles, where it leaves that one; and the cost."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import pytest
from corpus import CHATML, LLAMA, MISTRAL, Chat, house, system, systems, tool, user

from homeprefixd.chat.stable import apply
from homeprefixd.engine.account import Accountant
from homeprefixd.explain.causes import MOVE
from homeprefixd.explain.conclude import Explanation, conclude
from homeprefixd.explain.memory import Known, Memory, words_of
from homeprefixd.explain.prompt import Prompt
from homeprefixd.explain.proposal import Proposal
from homeprefixd.frames import Frame
from homeprefixd.frames.worker import (
    Account,
    Delta,
    Failure,
    Finished,
    GateDecision,
    Generate,
    Message,
    Sampling,
    StableRules,
    Timings,
)
from homeprefixd.lora import Space
from homeprefixd.prefix.blocks import from_le, to_le


class Words:
    """A tokenizer: words with the blanks before them."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.pieces: list[bytes] = []

    def tokens(self, text: str) -> list[int]:
        found = []
        for word in re.findall(r"\n| *(?:<\|\w+\|>|\w{1,6}|[^\w\s])|\s", text):
            if word not in self.ids:
                self.ids[word] = len(self.pieces)
                self.pieces.append(word.encode())
            found.append(self.ids[word])
        return found


class Worker:
    """An accountant, and the frames that it sent."""

    def __init__(self, stored: bytes = b"", grain: int = 1) -> None:
        self.rules = StableRules()
        self.words = Words()
        self.frames: list[Frame] = []
        self.asked = 0
        self._stored = stored
        self.accountant = Accountant(
            self._pieces, self.frames.append, self._neighbour, grain, in_force=lambda: self.rules
        )

    def _pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [self.words.pieces[token] for token in tokens]

    def _neighbour(self, salt: str, tokens: bytes) -> bytes:
        self.asked += 1
        return self._stored

    def ask(
        self, rid: str, chat: Chat, reply: str | None = "Done.", rules: Sequence[str] = ("rule",), **more: Any
    ) -> tuple[Account, int]:
        """What was told of a request, and how many tokens it had. `rules`: those that were applied."""
        tokens = self.words.tokens(chat.prompt().text)
        base = Generate(rid, chat.messages or None, chat.text or None, chat.tools, {}, 8, [], Sampling(), True)
        self.accountant.take(msgspec.structs.replace(base, **more), tokens, dict.fromkeys(rules, 1))
        account = self.frames[-1]
        assert isinstance(account, Account)
        if reply is not None:
            self.accountant.watch(Delta(rid, reply[:2], 1))
            self.accountant.watch(Delta(rid, reply[2:], 2))
            self.accountant.watch(Finished(rid, "stop", "", None, timings(0, 1)))
        return account, len(tokens)


def timings(reused: int, computed: int) -> Timings:
    return Timings(reused, computed, 1.0, 0.0, 0.0, 1, 1.0, {}, reused + computed)


WORDY = CHATML.replace(
    "# Tools\n\n",
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nFor each call, return a json"
    " object with function name and arguments within <tool_call></tool_call> XML tags.\n\nYou are given these:\n",
)

CLOCKS = systems(house("The time is 21:15."), house("The time is 21:16."))


def test_sections_add_up() -> None:
    account, count = Worker().ask("a", CLOCKS[0])
    assert sum(section.tokens for section in account.sections) == count
    assert [section.name for section in account.sections] == ["system message", "message 2 (user)", "template"]
    assert account.rules == {"rule": 1}
    assert not account.resembles


def test_where_it_leaves_the_one_before() -> None:
    worker = Worker()
    worker.ask("a", CLOCKS[0])
    account, count = worker.ask("b", CLOCKS[1])
    assert account.finding is not None
    assert account.finding.cause == "clock"
    tokens = worker.words.tokens(CLOCKS[1].prompt().text)
    assert worker.words.pieces[tokens[account.finding.token]].strip() == b"16"
    assert account.known == account.known_prompt == account.finding.token
    assert 0.8 * count < account.finding.alike < count
    told = conclude("b", account, timings(account.known, count - account.known), 10.0)
    assert (told.cause, told.seconds_lost) == ("clock", pytest.approx(told.tokens_lost / 10))


def test_the_next_turn() -> None:
    """All of the other's prompt and reply is known; if only its prompt was reused, the reply has made other tokens."""
    worker = Worker()
    before = Chat([system(house("Be kind.")), user("Light on, please.")])
    reply = "It is on now, and so is the one in the hall, as you have asked for before you went out to the garden, yes."
    prompt, reply_tokens = len(worker.words.tokens(before.prompt().text)), len(worker.words.tokens(reply))
    worker.ask("a", before, reply)
    after = Chat([*before.messages, Message("assistant", reply), user("Why?")])
    account, count = worker.ask("b", after)
    assert account.finding is None
    assert account.known_prompt == prompt
    assert account.known >= prompt + reply_tokens
    assert explained(account, account.known, count).cause == "goes_on"
    assert explained(account, prompt, count).cause == "retokenised"
    gone = explained(account, 0, count)
    assert (gone.cause, gone.tokens_lost) == ("not_kept", account.known)


def explained(account: Account, reused: int, total: int) -> Explanation:
    return conclude("r", account, timings(reused, total - reused), 0.0)


def test_what_was_left_on_disk_as_computing_is_faster_is_no_loss() -> None:
    worker = Worker()
    worker.ask("a", CLOCKS[0])
    account, count = worker.ask("b", CLOCKS[0])
    left = GateDecision(account.known, 0, "computed", {"warm": account.known}, 2.0, 1.0)
    told = conclude("b", account, timings(0, count), 10.0, left)
    assert (told.cause, told.tokens_lost, told.seconds_lost) == ("computed_faster", 0, 0.0)
    assert "faster" in told.text
    restored = msgspec.structs.replace(left, restored=account.known, reason="faster")
    assert conclude("b", account, timings(0, count), 10.0, restored).cause == "not_kept"  # it was promised, and lost
    little = msgspec.structs.replace(left, known=10)  # the store knew little
    assert conclude("b", account, timings(0, count), 10.0, little).cause == "not_kept"


def test_what_is_not_known_to_the_end_was_not_evicted() -> None:
    worker = Worker()
    worker.ask("a", CLOCKS[0], reply=None)  # it still runs
    account, count = worker.ask("b", CLOCKS[0], reply=None)
    assert account.known == 0
    assert explained(account, 0, count).cause == "goes_on"
    worker.accountant.watch(Failure("a", "WorkerDiedError", "died"))
    worker.accountant.watch(Failure("b", "WorkerDiedError", "died"))
    account, _count = worker.ask("c", CLOCKS[0])
    assert not account.resembles


@pytest.mark.parametrize("kept", [True, False])
def test_thoughts(kept: bool) -> None:
    """They come apart from the reply, and may be sent back or not."""
    worker = Worker()
    before = Chat([system(house("Be kind.")), user("Light on, please.")])
    worker.ask("a", before, reply=None)
    thoughts = "They want the light on, so I turn it on and say that it is on."
    worker.accountant.watch(Delta("a", "", 5, reasoning=thoughts))
    worker.accountant.watch(Delta("a", "It is on. " * 12, 9))
    worker.accountant.watch(Finished("a", "stop", "", None, timings(0, 1)))
    sent = Message("assistant", "It is on. " * 12, reasoning_content=thoughts if kept else None)
    account, count = worker.ask("b", Chat([*before.messages, sent, user("Why?")]))
    told = explained(account, account.known, count)
    assert told.cause == ("goes_on" if kept else "thoughts_stripped")
    assert explained(account, count - 4, count).cause == "goes_on"  # whatever the texts say: it was reused


def test_one_that_ends_before_it_is_accounted_for() -> None:
    worker = Worker()
    worker.accountant.watch(Finished("a", "stop", "Yes.", None, timings(0, 1)))
    worker.ask("a", CLOCKS[0], reply=None)
    assert not worker.accountant._replies  # nothing is left of it
    account, _count = worker.ask("b", CLOCKS[0])
    assert not account.resembles


@pytest.mark.parametrize("grain", [1, 64, 0])
def test_only_what_the_cache_would_surely_give_was_evicted(grain: int) -> None:
    worker = Worker(grain=grain)
    worker.ask("a", CLOCKS[0])
    account, count = worker.ask("b", CLOCKS[0])
    assert account.known == (count if grain == 1 else count // 64 * 64 if grain else 0)
    assert (explained(account, 0, count).cause == "not_kept") == (grain > 0)


def test_what_was_not_stored_was_not_evicted() -> None:
    worker = Worker()
    worker.ask("a", CLOCKS[0], reply=None)
    end = Finished("a", "stop", "Yes.", None, timings(0, 400), stored=0)  # the store was away
    worker.accountant.watch(end)
    account, count = worker.ask("b", CLOCKS[0])
    assert explained(account, 0, count).cause == "goes_on"


def test_another_salt() -> None:
    worker = Worker()
    worker.ask("a", CLOCKS[0], salt="anna")
    account, count = worker.ask("b", CLOCKS[0], salt="bernd")
    told = explained(account, 0, count)
    assert told.cause == "other_namespace"
    assert "cache_salt" in told.text


def test_ones_own_salt_comes_first() -> None:
    worker = Worker()
    worker.ask("a", CLOCKS[0], salt="anna")
    worker.ask("b", CLOCKS[1], salt="bernd")
    account, _count = worker.ask("c", CLOCKS[1], salt="anna")
    assert account.finding is not None
    assert account.finding.cause == "clock"


def test_no_cache_was_wanted() -> None:
    worker = Worker()
    worker.ask("a", CLOCKS[0])
    account, count = worker.ask("b", CLOCKS[0], cache=False)
    assert explained(account, 0, count).cause == "cache_off"


def test_short_and_new_ones() -> None:
    account, count = Worker().ask("a", Chat(text="Hello there."))
    assert explained(account, 0, count).cause == "too_short"
    account, count = Worker().ask("a", CLOCKS[0])
    assert explained(account, 0, count).cause == "never_seen"


@pytest.mark.parametrize("template", [CHATML, WORDY, LLAMA, MISTRAL])
def test_what_the_template_says_of_tools_is_not_alike(template: str) -> None:
    """The first request of another app, with tools of its own."""
    worker = Worker()
    about = "Greenhouse robot. Tomatoes first, then basil; soil below thirty percent means water for two minutes."
    tools = [tool("water_bed", "Waters a bed."), tool("read_soil", "Reads a soil sensor.")]
    worker.ask("a", Chat([system(about), user("Bed four?")], tools, template=template), client="1.2.3.4 robot/1")
    about = "Tutor for Latin grammar. Explain declensions by examples from Caesar, and give an exercise at the end."
    chat = Chat([system(about), user("Ablative?")], [tool("look_up", "Looks a word up."), tool("quiz", "Asks.")])
    chat.template = template
    account, count = worker.ask("b", chat, client="1.2.3.4 latin/1")
    told = explained(account, account.known, count)
    assert (told.cause, told.tokens_lost) == ("never_seen", 0)
    chat.messages[0] = system("Today you are in a hurry. " + about)
    account, count = worker.ask("c", chat, client="1.2.3.4 latin/1")
    told = explained(account, account.known, count)
    assert account.known + told.tokens_lost > 0.8 * count  # of what is like it, all counts


def test_a_rule_in_force_is_not_proposed() -> None:
    """The date that a template puts into every prompt changes at midnight, though the clock is stopped to the day."""
    chats = [Chat([system(NEW), user("Hello?")], template=LLAMA, now=datetime(2026, 11, day)) for day in (29, 30)]
    for frozen in (False, True):
        worker = Worker()
        worker.rules = StableRules(freeze_clock=frozen)
        in_force = ["freeze_clock"] if frozen else []
        account, count = [worker.ask(f"{n}", chat, rules=in_force) for n, chat in enumerate(chats)][1]
        told = explained(account, account.known, count)
        assert (told.cause, told.rule) == ("template_clock", "" if frozen else "freeze_clock")
        assert ("once a day, at midnight" in told.advice) == frozen
        assert told.tokens_lost > count / 2


def test_lost_to_a_clock_though_another_prompt_gave_a_part() -> None:
    """The cache still has yesterday's prompt of the same minute, with another state behind the clock; what stands
    behind that was computed a minute ago."""
    worker = Worker()
    door = "Current time: 07:{}\n\nYou are kind.\n" + "Be brief, and answer at once. " * 3 + "The door is {}.\n" + NEW
    worker.ask("a", Chat([system(door.format("43", "open")), user("Hello?")]))
    account, count = worker.ask("b", Chat([system(door.format("51", "open")), user("Well?")]))
    assert account.finding is not None
    tokens = worker.words.tokens(Chat([system(door.format("51", "open"))]).prompt().text)
    had = [worker.words.pieces[token] for token in tokens].index(b" open")
    told = explained(account, had, count)
    assert (told.cause, told.token) == ("clock", account.finding.token)
    assert had + told.tokens_lost == account.finding.until
    assert count - account.finding.until < 12  # the question, and what the template writes around it
    told = explained(account, account.finding.until, count)
    assert (told.cause, told.tokens_lost) == ("goes_on", 0)
    account, count = worker.ask("c", Chat([system(door.format("59", "locked")), user("So?")]))
    assert account.finding is not None
    assert account.finding.until < had + 8
    assert explained(account, had + 8, count).cause == "goes_on"  # nothing shows that what stands behind it was known


def test_after_a_restart_the_store_knows() -> None:
    worker = Worker()
    tokens = worker.words.tokens(CLOCKS[0].prompt().text)
    worker._stored = to_le(tokens[:300])
    account, _count = worker.ask("a", CLOCKS[1])
    assert account.finding is not None
    assert (account.finding.cause, account.finding.place) == ("clock", "the system message")
    worker.ask("b", CLOCKS[1])
    assert worker.asked == 1  # only while nothing is remembered


def test_trouble_is_not_the_requests(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Frame] = []
    accountant = Accountant(lambda token: b"x"[token].to_bytes(), sent.append)
    accountant.take(Generate("r", None, "x", None, {}, 8, [], Sampling(), True), [5], {})
    assert sent == []
    assert len(caplog.records) == 1


def test_text_that_is_not_utf8() -> None:
    worker = Worker()
    worker.words.pieces = [b"\xff", b"a", "ä".encode()[:1], "ä".encode()[1:]]
    for rid, tokens in (("a", [0, 1] * 30 + [2, 3]), ("b", [0, 1] * 30 + [1] * 60)):
        worker.accountant.take(Generate(rid, None, "x", None, {}, 8, [], Sampling(), True), tokens, {})
        worker.accountant.watch(Finished(rid, "stop", "x", None, timings(0, 1)))
    for frame in worker.frames:
        msgspec.msgpack.decode(msgspec.msgpack.encode(frame))


def test_memory_is_bounded() -> None:
    memory = Memory(most=3, characters=100)
    for number in range(10):
        known = Known(str(number), "", Space(), Prompt("x" * 30), to_le([number] * 8), words_of([number]))
        memory.add(known)
        memory.end(str(number), "y" * 10, whole=True)
    assert len(memory) == 2
    memory.add(Known("big", "", Space(), Prompt("x" * 1000), b"", frozenset()))
    assert len(memory) == 1


def test_it_takes_little_time() -> None:
    """2,300 tokens, as a household sends them, beside many that are remembered. The bar is `bench explain`'s."""
    worker = Worker()
    chats = [systems(house(f"The time is {hour}:15.") * 7, "")[0] for hour in range(10, 24)]
    took = []
    for number, chat in enumerate(chats * 2):
        tokens = worker.words.tokens(chat.prompt().text)
        assert len(tokens) > 2000
        request = Generate(str(number), chat.messages, None, None, {}, 8, [], Sampling(), True)
        begin = time.thread_time()
        worker.accountant.take(request, tokens, {})
        took.append(time.thread_time() - begin)
        worker.accountant.watch(Finished(str(number), "stop", "Yes.", None, timings(0, 1)))
    assert sorted(took)[len(took) // 4] < 0.1, took
    assert from_le(to_le([1])) == [1]


TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"What {name} does at home. " * 4}}
    for name in ("lights", "doors", "music")
]


def under(rules: StableRules, chat: Chat) -> Chat:
    """As the rules leave it."""
    asked = Generate("", chat.messages, None, chat.tools, {}, 8, [], Sampling(), True)
    made = apply(rules, asked)[0]
    return Chat(list(made.messages or ()), made.tools)


OLD = "Old words about the ferry, the price and the pier. " * 9
CLOCK = Chat([system(house("Current time: 21:15.\n")), user("Light on, please.")], TOOLS)
LATER = Chat([system(house("Current time: 21:16.\n")), user("Light on, please.")], TOOLS)
APART = [Chat([system(OLD), system(f"Current time: {t}."), user("Light on. " * 40)], TOOLS) for t in ("21:15", "21:16")]


@pytest.mark.parametrize(
    ("rules", "first", "second"),
    [
        (StableRules(move_volatile_line=True), CLOCK, LATER),
        (StableRules(move=r"^Current time[^\n]*$"), CLOCK, LATER),
        (StableRules(move_volatile_line=True), *APART),  # a message that goes
        (StableRules(sort_tools=True), CLOCK, CLOCK),
        (StableRules(sort_keys=True), CLOCK, CLOCK),
        (StableRules(custom=r"Current time[^\n]*"), CLOCK, LATER),
    ],
    ids=["lines", "move", "apart", "tools", "keys", "custom"],
)
def test_a_rule_that_came_into_force_is_the_reason_once(rules: StableRules, first: Chat, second: Chat) -> None:
    [name] = [key for key, value in msgspec.structs.asdict(rules).items() if value and key not in KEPT]
    worker = Worker()
    worker.ask("a", under(StableRules(), first))
    worker.rules = rules
    account, count = worker.ask("b", under(rules, second))
    told = conclude("b", account, timings(account.known, count - account.known), 10.0)
    assert (told.cause, told.tokens_lost, told.rule) == ("rule_applied", 0, "")
    assert f"`{name}` of [stable]" in told.text
    account, count = worker.ask("c", under(rules, first), rules=(name,))
    moved = first != second and name != "custom"
    assert explained(account, account.known, count).cause == ("rule_moved" if moved else "goes_on")
    back = Worker()  # the other way round: it is not in force any more
    back.rules = rules
    back.ask("a", under(rules, first))
    back.rules = StableRules()
    account, count = back.ask("b", under(StableRules(), second))
    assert explained(account, account.known, count).cause == "rule_applied"


KEPT = ("drop_billing_line", "freeze_clock")  # that are on from the beginning


def test_a_rule_that_changed_nothing_here_is_not_the_reason() -> None:
    """The clock stands before the line that was moved: it would have been lost without the rule, too."""
    rules = StableRules(move=r"^Room: [^\n]*$")
    chats = [
        Chat([system(house(f"Now it is {time}.\nRoom: hall\nThat is all for the hall.\n")), user("Hello.")])
        for time in ("21:15", "21:16")
    ]
    worker = Worker()
    worker.ask("a", under(StableRules(), chats[0]))
    worker.rules = rules
    account, _count = worker.ask("b", under(rules, chats[1]))
    assert account.finding is not None
    assert account.finding.cause == "clock"


NEW = "New rules for the museum, its guards and its lamps at night. " * 9
OF_A_HOUSE = (
    "You are the voice assistant of the Nilsson family. Answer in plain text, keep it short, and use its tools. "
)


def test_a_value_that_comes_again_is_found_though_another_prompt_begins_more_alike() -> None:
    """Of two rooms, of which the first comes again after the text behind it was changed."""
    worker = Worker()
    rooms = (("z", "Hall", OLD), ("a", "Bathroom", OLD), ("b", "Kitchen", NEW), ("c", "Bathroom", NEW))
    for rid, room, text in rooms:
        account, count = worker.ask(rid, Chat([system(f"Area: {room}.\n{OF_A_HOUSE}{text}"), user("Which way?")]))
    told = conclude("c", account, timings(account.known, count - account.known), 10.0)
    assert (told.cause, told.place, told.before, told.after) == (
        "changing_value", "the system message", "Area: Kitchen.", "Area: Bathroom.",
    )  # fmt: skip
    assert told.tokens_lost > count / 2
    assert told.tokens_lost <= count - account.known
    assert told.rule == "move_volatile_line"


def test_an_edit_is_found_though_another_prompt_begins_more_alike() -> None:
    letter = "Dear Mrs Abara, we thank you for the {}. " + "The children still speak of the fireworks and the dog. " * 9
    asked = [letter.format("wonderful concert")[:52] + " Yours.", letter.format("lovely evening")]
    worker = Worker()
    for rid, text in enumerate([*asked, letter.format("wonderful concert")]):
        account, count = worker.ask(str(rid), Chat([system("You proof-read letters."), user(text)]))
    told = conclude("2", account, timings(account.known, count - account.known), 10.0)
    assert (told.cause, told.place) == ("changed_text", "message 2 (user)")
    assert count / 2 < told.tokens_lost <= count - account.known


MORITZ, FRIEDA = (
    f"You are {name}, a helpful assistant for the workshop.\nThe time is {time}.\n{NEW}"
    for name, time in (("Moritz", "21:15"), ("Frieda", "21:15"))
)


def test_there_is_no_rule_for_what_two_apps_say() -> None:
    worker = Worker()
    worker.ask("a", Chat([system(MORITZ), user("Hello?")]), client="10.0.0.2 max-app/1")
    account, count = worker.ask("b", Chat([system(FRIEDA), user("Hello?")]), client="10.0.0.2 eva-app/1")
    told = conclude("b", account, timings(account.known, count - account.known), 10.0)
    assert (told.cause, told.rule) == ("changed_text", "")
    for app, cause, rule in (("max-app/2", "clock", "move_volatile_line"), ("eva-app/1", "clock", "")):
        worker = Worker()
        worker.ask("a", Chat([system(MORITZ), user("Hello?")]), client="10.0.0.2 max-app/1")
        later = Chat([system(MORITZ.replace("21:15", "21:16")), user("Hello?")])
        account, count = worker.ask("b", later, client=f"10.0.0.2 {app}")
        told = conclude("b", account, timings(account.known, count - account.known), 10.0)
        assert (told.cause, told.rule) == (cause, rule)


def test_what_a_rule_moves_is_not_blamed_on_the_app() -> None:
    """Neither in the next turn, where the old question has no clock any more, nor where only the clock differs."""
    rules = StableRules(move_volatile_line=True)
    base = [system(f"The time is 21:15.\n{NEW}"), user("Is the light in the hall on? " * 4)]
    worker = Worker()
    worker.ask("a", under(rules, Chat(base)), "Yes, it is, as you wanted.", rules=("move_volatile_line",))
    turn = Chat(
        [system(f"The time is 21:16.\n{NEW}"), base[1], Message("assistant", "Yes, it is."), user("Since when?")]
    )
    once = Chat([system(f"The time is 21:17.\n{NEW}"), base[1]])
    for rid, chat in (("b", turn), ("c", once)):
        account, count = worker.ask(rid, under(rules, chat), rules=("move_volatile_line",))
        told = conclude(rid, account, timings(account.known, count - account.known), 10.0)
        assert (told.cause, told.tokens_lost, told.rule, told.advice) == ("rule_moved", 0, "", "")
        assert "what a rule of [stable] moves" in told.text
    typed = Chat([system(NEW), user("Current values:\n1\n\nWhy? " + "And how? " * 20)])
    other = Chat([system(NEW), user("Current values:\n2\n\nWhy? " + "And how? " * 20)])
    worker.ask("d", typed)
    account, count = worker.ask("e", other)  # no rule was applied: somebody has typed it
    assert explained(account, account.known, count).cause == "counter"


def test_a_reply_that_its_template_writes_otherwise() -> None:
    """As Mistral's writes a blank before it. It has its place, and what to do if the memo is off."""
    worker = Worker()
    template = "{% for m in messages %}[{{ m.role }}]{{ ' ' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    reply = "It is on, and so is the one in the hall, as you have asked for before you went out to the garden, yes."
    before = [system(house("Be kind.")), user("Light on, please.")]
    worker.ask("a", Chat(before, template=template), reply)
    after = Chat([*before, Message("assistant", reply), user("Why?")], template=template)
    account, count = worker.ask("b", after)
    told = explained(account, account.known_prompt, count)
    assert (told.cause, told.place) == ("retokenised", "message 3 (assistant)")
    assert told.tokens_lost > 12
    reply = " " + "lamp" * 40 + "\nyes"  # of which no piece is found whole behind another blank
    worker.ask("c", Chat([*before, user("More?")], template=template), reply)
    again, total = worker.ask(
        "d", Chat([*before, user("More?"), Message("assistant", reply), user("Why?")], template=template)
    )
    assert explained(again, again.known_prompt, total).cause == "retokenised"
    assert "template" in told.advice
    account.no_replay = True
    assert "`cache.replay`" in explained(account, account.known_prompt, count).advice


def remembered(texts: Sequence[str], app: str = "app") -> tuple[Memory, Known]:
    """Prompts of an app, of which the last is the new one."""
    memory = Memory()
    for number, text in enumerate(texts):
        prompt = Prompt(text, [Message("system", text), Message("user", f"At most {number} words.")])
        known = Known(f"{number}", f"1.2.3.{number} {app}/{number}", Space(), prompt, b"", frozenset())
        memory.add(known)
    return memory, known


@pytest.mark.parametrize(
    ("line", "values", "supported"),
    [
        ("At most {} words.", (20, 30), False),  # edited once
        ("Replies in {} words.", (20, 30, 40), False),  # edited twice
        ("Replies in {} words.", (20, 30, 20, 30, 20), False),
        ("Replies in {} words.", (20, 20, 30, 30, 30, 40), False),
        ("Tokens so far: {}.", (20, 31, 42, 57, 71), True),
        ("Bedtime: {}", ("19:30", "20:00", "20:15"), False),  # round times
        ("Klockan är {}.", ("19:30", "19:31", "19:34"), True),
        ("Klockan är {}.", ("19:30", "19:31"), False),
        ("Stand: {}", ("30.11.2026", "1.12.2026", "2.12.2026"), True),
        ("Nous sommes le {}.", ("lundi 30 novembre", "mardi 1er décembre", "mercredi 2 décembre"), True),
        ("Hoy es {}.", ("30 de noviembre", "1 de diciembre", "2 de diciembre"), True),
        ("No meat on {}.", ("Friday", "Sunday", "Monday"), False),
        ("Trace: {}", ("41be03dd", "7af1c2", "0c9b77e1"), True),
        ("Mood: {}", ("merry", "sad", "tired"), False),
        ("User: {}", ("Mia", "Tom", "Mia", "Eva", "Mia"), True),
        ("At most {} words.\nAt most 3 words.", range(20, 30), False),  # two in each
    ],
)
def test_what_is_a_value(line: str, values: Sequence[object], supported: bool) -> None:
    """Not what somebody edits: an instruction is edited, and then it stays."""
    expression = "^" + re.escape(line.split("\n")[0]).replace(r"\{\}", ".+") + "$"
    memory, new = remembered([f"Be kind.\n{line.format(value)}\nBe brief." for value in values])
    assert memory.supports(Proposal("move", expression), new) == supported
    assert not memory.supports(Proposal("move", expression), replace_client(new, "1.2.3.4 other/1"))


def replace_client(known: Known, client: str) -> Known:
    return Known("new", client, known.space, known.prompt, known.tokens, known.words)


CONSTANT = (
    "Area of expertise: plumbing and heating\nTemperature limits: 16 to 23 degrees\nWeather provider: yr.no\n"
    "Location privacy: strict\nSession rules: one question at a time\nTurn order: clockwise\n"
)


@pytest.mark.parametrize(
    ("others", "supported"),
    [
        ([CONSTANT], True),  # which it does not move
        (["Location: Uppsala"], False),
        (["Location: Uppsala", "Location: Uppsala"], False),
        (["Location: Uppsala", "Location: Lund"], False),  # edited
        (["Location: Uppsala", "Location: Lund", "Location: Falun"], True),
        (["You are in area Kitchen."], False),
        (["You are in area Kitchen.", "You are in area Hall."], True),  # as a program says it
        (["Time: 18:30"], False),
        (["Time: 18:30", "Time: 18:41"], True),
        (["Today is 2026-11-30."], True),  # it says that it changes
        (["Temperature: 21 °C", "Temperature: 22 °C"], False),
        (["Session 41ab02", "Session 87bc65"], True),
    ],
)
def test_a_rule_is_tried_on_all_prompts_of_the_app(others: list[str], supported: bool) -> None:
    clocks = [f"Current time: 21:1{n}" for n in (5, 6)]
    memory, new = remembered([f"Be kind.\n{line}\nBe brief." for line in (*others, *clocks)])
    assert memory.supports(Proposal("move_volatile_line"), new) == supported
    alone = replace_client(new, "1.2.3.4 other/1")
    assert memory.supports(Proposal("move_volatile_line"), alone)


def test_where_the_rule_would_take_a_fact_along_an_expression_is_proposed() -> None:
    worker = Worker()
    worker.ask("a", Chat([system(f"Location: Uppsala\n{OLD}"), user("Hello?")]))
    told = []
    for rid, minute in (("b", 15), ("c", 16), ("d", 17)):
        account, count = worker.ask(rid, Chat([system(f"Current time: 21:{minute}\n{NEW}"), user("Hello?")]))
        told.append(explained(account, account.known, count))
    assert [one.rule for one in told[1:]] == ["", "move"]
    assert re.search(told[-1].setting, "Current time: 21:18", re.MULTILINE)


def test_what_was_proposed_is_judged_by_what_comes_after_it() -> None:
    """A constant line beside it, which the rule would take along; a second one that the expression finds."""
    worker = Worker()
    told = []
    for number, line in enumerate(("bath", "attic", "hall", "bath\nWeather: sunny", "hall\nWeather: sunny")):
        account, _ = worker.ask(f"a{number}", Chat([system(f"Be kind.\nRoom: {line}\n{NEW}"), user("Hello?")]))
        told.append([(one.rule, one.fits) for one in account.judged])
    assert told == [[], [], [(MOVE, True)], [(MOVE, False)], [(MOVE, False)]]
    account, _ = worker.ask("other", Chat([system(NEW), user("Hello?")]), client="1.2.3.4 other/1")
    assert account.judged == []  # it is another app's
    for number, line in enumerate(("rain", "snow")):
        room = f"Room: bath\nWeather: {line}"
        account, _ = worker.ask(f"b{number}", Chat([system(f"Be kind.\n{room}\n{NEW}"), user("Hello?")]))
    assert [(one.rule, one.fits) for one in account.judged] == [(MOVE, True)]  # it changes, too

    worker = Worker()
    told = []
    bells = ("21:43", "21:51", "22:07", "22:16\nDoor bell rang at 07:00", "22:33\nDoor bell rang at 07:00", "22:41")
    for number, bell in enumerate(bells):
        account, _ = worker.ask(f"c{number}", Chat([system(f"Door bell rang at {bell}\n{NEW}"), user("Hello?")]))
        told.append([(one.rule, one.fits) for one in account.judged])
    assert told == [[], [], [("move", True)], *[[("move", False)]] * 3]


def test_the_shape_of_home_assistant_gets_its_rule() -> None:
    """Its time alone, while the area stays; all of it, once a second satellite has asked."""
    worker = Worker()
    rules = []
    for number, area in enumerate(("Hall", "Hall", "Hall", "Attic", "Attic")):
        line = (
            f"Current time is 14:05:{41 + number}. Today's date is 2026-11-30.\nYou are in area {area} (floor Upper)."
        )
        account, count = worker.ask(f"{number}", Chat([system(f"{line}\n{NEW}"), user("Hello?")]))
        rules.append(explained(account, account.known, count).rule)
    assert rules == ["", "", "move", "move_volatile_line", "move_volatile_line"]
