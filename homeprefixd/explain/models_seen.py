"""Which model a chat was sent to before: so that one who asks another model is told why nothing is reused.

Remembers hashes of the beginnings of chats, no text. Bounded; not for several threads at once.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from ..chat.stable import drop_billing_line
from ..frames.worker import Message
from .conclude import OtherModel

_MOST = 4096  # beginnings of chats
_LEAST = 400  # characters of one that is worth a word


class ModelsSeen:
    """The last chats, by how they begin."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._models: OrderedDict[bytes, set[str]] = OrderedDict()

    def see(self, model: str, salt: str, messages: Sequence[Message]) -> OtherModel | None:
        """Note a chat. The other model that has the longest beginning of it, if that is longer than `model`'s own."""
        hashed = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16)
        own = 0
        best, named = 0, ""
        characters = 0
        for message in messages:
            content = message.content or ""
            if message.role == "system":
                content, _ = drop_billing_line(content)  # it is new with each request
            characters += len(content)
            hashed.update(f"\0{message.role}\0{len(content)}\0{content}".encode(errors="surrogatepass"))
            if characters < _LEAST:
                continue
            key = hashed.digest()
            known = self._models.setdefault(key, set())
            self._models.move_to_end(key)
            if model in known:
                own = characters
            others = known - {model}
            if others:
                best, named = characters, min(others)
            known.add(model)
        while len(self._models) > self._most:
            self._models.popitem(last=False)
        return OtherModel(named, best / characters) if best > own else None
