"""A headless Chromium, driven through pipes by its DevTools protocol."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab.

    Attributes:
        events: that the browser has sent, by method.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest, self._ids, self._session = b"", itertools.count(1), ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < end, script
            time.sleep(0.05)

    def press(self, key: str, code: int, text: str = "") -> None:
        options: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        kind = "keyDown" if text else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", type=kind, text=text, **options)
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)


@contextlib.contextmanager
def page(program: str, folder: Path) -> Iterator[Page]:
    """Open a tab of a browser that keeps its files in `folder`."""
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()

    def pipes() -> None:
        os.dup2(read_commands, 3 + 100)
        os.dup2(write_answers, 4 + 100)
        os.dup2(103, 3)
        os.dup2(104, 4)

    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--remote-debugging-pipe", "--window-size=1100,720", "--no-first-run"]
    process = subprocess.Popen(
        [program, *options, f"--user-data-dir={folder}", "about:blank"],
        preexec_fn=pipes,
        close_fds=False,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Page(commands, answers)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
