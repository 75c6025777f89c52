"""A real headless Chromium, driven by its DevTools protocol over a WebSocket: pages as their readers see them.

python -m tests.kit.browser URL FILE.png          the picture of docs/dashboard.md, of a demo with a paused leader
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PATIENCE_S = 120.0
"""For what comes sooner or later, on whatever machine."""

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(
    PROGRAM is None, reason="*** THE PAGE IS NOT TESTED: no Chromium here; .ci/system installs Debian's `chromium` ***"
)


class Tab:
    """A page of the browser.

    Attributes:
        errors: what the console and uncaught exceptions said, requests that failed, and what the policy blocked.
        loaded: the address of each request.
    """

    def __init__(self, browser: Browser, session: str, profile: str) -> None:
        self._browser = browser
        self._session = session
        self._profile = profile
        self.errors: list[str] = []
        self.loaded: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol."""
        return await self._browser.call(method, session=self._session, **params)

    async def close(self) -> None:
        """Close the page, and forget its profile."""
        await self._browser.call("Target.disposeBrowserContext", browserContextId=self._profile)

    async def look(self, *, width: int, height: int = 900, scheme: str = "light", is_calm: bool = False) -> None:
        """The size of the window, the colours and the motion that the reader wants."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce" if is_calm else "no-preference"}
        features = [{"name": name, "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        """Go there, and wait until it is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, of a promise when it is kept. Raises RuntimeError: it threw."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.evaluate(f"Boolean({condition})"):  # noqa: ASYNC110 - it is the browser's
                await asyncio.sleep(0.05)

    async def press(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
        if key == "Enter":
            await self.call("Input.dispatchKeyEvent", type="char", text="\r", key=key)

    async def screenshot(self, path: Path) -> None:
        """The whole page, also what is below the window."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))  # noqa: ASYNC240 - of a test

    def note(self, method: str, params: dict[str, Any]) -> None:
        """An event of the protocol."""
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str([argument.get("value") for argument in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.loaded.append(params["request"]["url"])


class Browser:
    """The process and its WebSocket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, *, session: str = "", **params: Any) -> dict[str, Any]:
        """Send a command, and return its result. Raises RuntimeError: the browser refuses it."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        async with asyncio.timeout(PATIENCE_S):
            return await self._waiting[number]

    async def tab(self) -> Tab:
        """A new page, with a profile of its own."""
        profile = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=profile)
        session = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = self._tabs[session["sessionId"]] = Tab(self, session["sessionId"], profile)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        return tab

    async def _read(self) -> None:
        async for message in self._socket:
            document = json.loads(message.data)
            waiting = self._waiting.pop(document.get("id", 0), None)
            if waiting is not None and not waiting.done():
                if "error" in document:
                    waiting.set_exception(RuntimeError(str(document["error"])))
                else:
                    waiting.set_result(document["result"])
            elif (tab := self._tabs.get(document.get("sessionId", ""))) is not None:
                tab.note(document["method"], document["params"])


@contextlib.asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Browser]:
    """A browser with a fresh profile in the folder, which nothing outside this machine is asked for."""
    assert PROGRAM is not None
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *("--headless=new", "--no-sandbox", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}"),
        *("--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"),
        *("--disable-extensions", "--disable-component-update", "--hide-scrollbars", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "HOME": str(folder), "TZ": "UTC"},
    )
    assert process.stderr is not None
    draining: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while (match := re.search(rb"DevTools listening on (ws://\S+)", await process.stderr.readline())) is None:
                assert process.returncode is None, "Chromium ended at once"
        draining = asyncio.create_task(process.stderr.read())
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(match[1].decode(), max_msg_size=2**28) as socket,
        ):
            yield Browser(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if draining is not None:
            draining.cancel()


async def picture(url: str, path: Path) -> None:
    """The upper half of a dashboard, 1280 pixels wide, once a region has been away for a while."""
    with tempfile.TemporaryDirectory() as folder:
        async with chromium(Path(folder)) as browser:
            tab = await browser.tab()
            await tab.look(width=1280)
            await tab.open(url)
            await tab.until("document.querySelector('.card.bad')")
            await tab.until("document.querySelector('#fragments svg').textContent.includes('✕')")
            height = await tab.evaluate("document.getElementById('rounds').getBoundingClientRect().bottom + 10")
            clip = {"x": 0, "y": 0, "width": 1280, "height": height, "scale": 1}
            answer = await tab.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
            path.write_bytes(base64.b64decode(answer["data"]))  # noqa: ASYNC240 - of a test


if __name__ == "__main__":
    asyncio.run(picture(sys.argv[1], Path(sys.argv[2])))
