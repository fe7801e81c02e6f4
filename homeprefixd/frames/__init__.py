"""What the processes say to each other: every frame, as a msgspec Struct.

Three links, each a Unix stream socket pair made by the daemon (`channel.py` carries the frames):

* daemon <-> worker: requests down, text up (`worker.py`)
* worker, daemon or CLI <-> store: what is known, kept and asked about it (`store.py`)

Frames are msgpack arrays tagged by class name. A field may be added at the end with a default; nothing else changes
without both sides. No frame carries KV state: that goes through the arena, shared memory whose descriptor travels
with `Welcome`.
"""

from __future__ import annotations

import msgspec


class Frame(msgspec.Struct, array_like=True, tag=True):
    """Base of all frames."""


class Stop(Frame):
    """No new requests; running ones may go on for `grace` seconds; then the process ends, exit 0."""

    grace: float
