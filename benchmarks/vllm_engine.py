"""vLLM in a process of another environment, for the requests of `serving`, and its decoding
methods: vLLM's, and this package's within vLLM.

Run as a program in that environment, the module answers lines of JSON: a new request, or an empty
object for the arrivals of a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_KV_BYTES = 1 << 28
_WINDOW = 4  # of a single drafter below vLLM's target
_PROPOSER = "polyspec_ext.integrations.vllm.chain.ChainProposer"
VLLM, NGRAM, DRAFT, RULE, TWO, POLICY = OF_VLLM = (
    "vllm", "vllm-ngram", "vllm-draft", "vllm-rule", "vllm-two", "vllm-policy",
)  # fmt: skip
# Label, and arguments of vLLM's ``EngineArgs``, by method.
Ways = dict[str, tuple[str, dict[str, Any]]]


def ways(
    target: str, dtype: str, drafts: Sequence[str], window: Sequence[int] | None, policy: str
) -> Ways:
    """Return the decoding methods for a target's directory and the levels `drafts` below it, the
    dearest first, with a window per level. vLLM drafts with the first model. `policy` chooses
    windows up to `window`."""
    from benchmarks.methods import WORDS
    from polyspec_ext.drafters.words import original

    models = [path for path in drafts if path not in WORDS]
    alone: dict[str, Any] = {"model": target, "dtype": dtype}

    def drafted(drafting: dict[str, Any], ours: dict[str, Any] | None = None) -> dict[str, Any]:
        rest = {} if ours is None else {"additional_config": {"polyspec": ours}}
        most = _WINDOW if ours is None else ours.get("window", [_WINDOW])[0]
        return {**alone, "speculative_config": {"num_speculative_tokens": most, **drafting}, **rest}

    ngram = {"method": "ngram", "prompt_lookup_max": 3}
    choices: Ways = {VLLM: ("vLLM", alone), NGRAM: ("vLLM, its ngram", drafted(ngram))}
    if models:
        draft = {"method": "draft_model", "model": str(original(models[0]))}
        drawn = {**draft, "draft_sample_method": "probabilistic"}
        choices[DRAFT] = "vLLM, its draft model", drafted(draft)
        choices[RULE] = "vLLM, its draft model, our rule", drafted(drawn, {"rule": "token"})
        proposer = {"method": "custom_class", "model": _PROPOSER}
        windows = list(window or [_WINDOW] * len(drafts))
        for key, levels, sizes, rest in (
            (TWO, models[:1], [_WINDOW], {}),
            (POLICY, list(drafts), windows, {"policy": policy}),
        ):
            label = f"our {len(levels) + 1} levels in vLLM" + f", {policy} policy" * bool(rest)
            chain = {"levels": levels, "window": sizes, **rest}
            choices[key] = label, drafted(proposer, chain)
    return choices


class VllmEngine:
    """vLLM with fixed arguments of ``EngineArgs``, in a process on all cores of this process.
    `command` has no path of this machine."""

    def __init__(self, python: Path, options: Mapping[str, Any]) -> None:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        environment = {
            **os.environ,
            # The second has the plug-in's entry point (.ci/vllm).
            "PYTHONPATH": os.pathsep.join([str(_ROOT), str(python.parents[1] / "entry")]),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("OMP_NUM_THREADS", None)
        # vLLM requires this OpenMP for speculation on a CPU.
        openmp = python.parents[1] / "lib" / "libiomp5.so"
        if openmp.is_file():
            environment["LD_PRELOAD"] = str(openmp)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`close` closes it)
        self._process = subprocess.Popen(
            [python, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        # Texts lose their folders, and keep a prefix such as "w4:".
        self.command = "vLLM " + re.sub(r'"(\w+:)?[^"]*/', r'"\1', json.dumps(options))
        try:
            self.version = str(self._answer()["version"])
        except BaseException:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()
            raise RuntimeError(f"vLLM has ended: {lines[-1] if lines else 'no message'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a new request, or nothing for a step; return the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._errors.close()


def _serve(options: dict[str, Any]) -> None:
    """Answer lines of standard input until it ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's log
    import vllm
    from vllm.sampling_params import RequestOutputKind

    arguments = {"kv_cache_memory_bytes": _KV_BYTES, "enable_prefix_caching": False, **options}
    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
    out.write(json.dumps({"version": vllm.__version__}) + "\n")
    for line in sys.stdin:
        message = json.loads(line)
        arrivals = []
        if message:
            key, prompt = message.pop("key"), {"prompt_token_ids": message.pop("prompt")}
            chosen = vllm.SamplingParams(
                **message, detokenize=False, output_kind=RequestOutputKind.DELTA
            )
            engine.add_request(key, prompt, chosen)
        else:
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                arrivals.append([output.request_id, tokens, output.finished])
        out.write(json.dumps({"arrivals": arrivals}) + "\n")


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
