"""A headless Chromium, by its DevTools protocol over two pipes."""

import itertools
import json
import os
import shutil
import subprocess
import time

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
#: The longest wait for a page or a condition, in seconds.
PATIENCE = 60


class Browser:
    """One page at a time: ``open``, ``evaluate`` JavaScript in it, ``wait`` until an expression is
    true.
    """

    def __init__(self, folder):
        to_child, self.sink = os.pipe()
        self.source, from_child = os.pipe()
        flags = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        )
        command = [
            PROGRAM,
            *flags,
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # Chromium reads commands from 3 and writes answers to 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{to_child} 4>&{from_child}', "_", *command]
        self.process = subprocess.Popen(
            shell,
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self.numbers, self.rest, self.session = itertools.count(1), b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        os.close(self.sink)
        os.close(self.source)

    def call(self, method: str, **params) -> dict:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.sink, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:  # the others are events
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self.rest:
            data = os.read(self.source, 1 << 20)
            assert data, "the browser has ended"
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression: str):
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str):
        """The first value of the expression that is true."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.1)
        raise TimeoutError(expression)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(
            f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'"
        )

    def width(self, pixels: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=pixels,
            height=800,
            deviceScaleFactor=1,
            mobile=pixels < 800,
        )

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
