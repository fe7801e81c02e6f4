"""The demo's table. The demo itself runs in `tests/integration/test_demo.py`."""

from __future__ import annotations

import io

from homeprefixd.cli.demo import Step, show
from homeprefixd.cli.output import Output


def test_the_table() -> None:
    stream = io.StringIO()
    steps = [
        Step("cold", "?", "!", 9.8346, 2230, 2230, {}, 40 << 20, 1.0),
        Step("hot", "?", "!", 0.0512, 2228, 21, {"hot": 2207, "warm": 0}, 41 << 20, 192.1),
        Step("restart", "?", "!", 1.2, 2228, 21, {"warm": 2100, "hot": 107}, 42 << 20, 8.19),
    ]
    show(Output(stream=stream), steps)
    lines = [line for line in stream.getvalue().splitlines() if line]
    assert lines[0].split() == ["step", "TTFT", "computed", "reused", "stored", "speed-up"]
    assert lines[1].split() == ["cold", "9.83", "s", "2,230", "-", "40.0", "MiB", "1.0", "x"]
    assert lines[2].split() == ["hot", "51", "ms", "21", "2,207", "hot", "41.0", "MiB", "192", "x"]
    assert lines[3].split() == ["restart", "1.20", "s", "21", "2,100", "warm,", "107", "hot", "42.0", "MiB", "8.2", "x"]
    assert "TTFT" in lines[-1]
