"""A headless Chromium of this machine, driven over its debugging protocol. Nothing is installed for it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find() -> str | None:
    """Path of a browser, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page. `problems`: what it complained of (exceptions, errors in the console, violations of its policy)."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []

    async def read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                waiting = self._waiting.pop(told["id"])
                if "error" in told:
                    waiting.set_exception(RuntimeError(told["error"]["message"]))
                else:
                    waiting.set_result(told["result"])
            elif told["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(told["params"]["exceptionDetails"])[:500])
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.problems.append(told["params"]["entry"]["text"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        async with asyncio.timeout(20):
            return await answer

    async def value(self, expression: str) -> Any:
        """Of JavaScript, which may be a promise."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(json.dumps(told["exceptionDetails"])[:500])
        return told["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until it is true."""
        try:
            async with asyncio.timeout(15):
                while not await self.value(expression):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never: {expression}; problems: {self.problems}") from None

    async def key(self, name: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=codes[name], **more
            )

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def screen(self, width: int, height: int, *, dark: bool, phone: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """The whole page, as PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))  # noqa: ASYNC240


@contextlib.asynccontextmanager
async def open_page(browser: str, url: str, profile: Path) -> AsyncIterator[Tab]:
    """A tab that shows `url`; the browser ends with it."""
    process = await asyncio.create_subprocess_exec(
        browser,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = profile / "DevToolsActivePort"
        async with asyncio.timeout(30):
            while not (port.exists() and port.read_text().count("\n")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        base = f"http://127.0.0.1:{port.read_text().split()[0]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base}/json/list") as reply:
                target = next(one for one in await reply.json() if one["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
                tab = Tab(socket)
                reader = asyncio.create_task(tab.read())
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.navigate", url=url)
                try:
                    yield tab
                finally:
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its helpers hold connections, too
        await process.wait()
