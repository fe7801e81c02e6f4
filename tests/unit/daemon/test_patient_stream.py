"""Log lines that nobody reads cost nobody time."""

from __future__ import annotations

import os
import time

from homeprefixd.patient_stream import PatientStream


def read_all(descriptor: int, until: bytes, seconds: float = 10) -> bytes:
    found, end = b"", time.monotonic() + seconds
    while until not in found:
        assert time.monotonic() < end, found[-200:]
        found += os.read(descriptor, 1 << 20)
    return found


def test_a_pipe_that_nobody_reads_stops_nobody() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        stream = PatientStream(pipe)
        began = time.monotonic()
        for number in range(30_000):  # 600 kB: more than the pipe takes, and more than waits
            stream.write(f"line {number:08d} ....\n")
            stream.flush()
        assert time.monotonic() - began < 5
        stream.drain()
        text = read_all(reading, b"lines were lost").decode()
        stream.write("and on it goes\n")
        text += read_all(reading, b"goes\n").decode()
    os.close(reading)
    lines = text.splitlines()
    kept = [line for line in lines if line.startswith("line ")]
    lost = next(line for line in lines if "were lost" in line)
    assert kept == [f"line {i:08d} ...." for i in range(len(kept))]
    assert len(kept) + int(lost[1:].split()[0]) == 30_000
    assert lines[-1] == "and on it goes"


def test_lines_are_whole_and_in_order() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        stream = PatientStream(pipe)
        for piece in ("a", "b\nc", "\n", "d\udcff\n"):
            stream.write(piece)
        stream.drain()
        assert read_all(reading, b"d") == b"ab\nc\nd\\udcff\n"
        assert not stream.isatty()
        assert stream.fileno() == writing
    os.close(reading)
