"""Other engines as methods: OpenVINO GenAI in this process, and llama.cpp through the program of
csrc/examples/llama_cpp or its server.

Each engine has a separate form of the target (an OpenVINO IR, a GGUF file), which is another model
if its weights are rounded differently. So its texts are compared with its plain decoding.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measuring import Answer, Decode, Request
from polyspec_ext.cli import options

_ASSISTED = "-assisted"  # suffix of an engine's key: its speculation with a draft model
_WINDOW = 4
_START_SECONDS = 600.0  # limit for loading a server
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Variant(NamedTuple):
    """A decoding method of an engine."""

    key: str  # in ``--methods``
    label: str  # for tables
    drafts: bool  # whether a draft model is below the target
    plain: str  # key of the variant with the reference texts
    flags: str = ""  # of the program


_OPENVINO = [
    Variant("openvino", "OpenVINO GenAI, plain", False, "openvino"),
    Variant(f"openvino{_ASSISTED}", "OpenVINO GenAI with draft", True, "openvino"),
]
_RULE = f"--windows {_WINDOW} --rule"
_LLAMA_CPP = [
    Variant(f"llama.cpp{suffix}", label, _RULE in flags, plain, flags)
    for suffix, label, plain, flags in (
        ("", "llama.cpp, plain", "llama.cpp", "--fast"),
        (_ASSISTED, "llama.cpp's rule with draft", "llama.cpp", f"--fast {_RULE} llama.cpp"),
        # Reference of the chain: plain decoding with the same settings must have the same texts.
        ("-exact", "llama.cpp, invariant settings", "llama.cpp-exact", "--exact"),
        ("-chain", "our chain in llama.cpp", "llama.cpp-exact", f"--exact {_RULE} block"),
    )
]


class OpenVino:
    """OpenVINO GenAI, with directories of exported models and properties of its pipelines;
    `variants`: decoding methods."""

    def __init__(self, target: Path, draft: Path | None = None, **properties: Any) -> None:
        if importlib.util.find_spec("openvino_genai") is None:
            expected = "expected the package openvino-genai, given an environment without it"
            raise ValueError(f"--openvino: {expected}")
        for path in (target, draft):
            if path is not None and not (path / "openvino_model.xml").is_file():
                expected = f"expected openvino_model.xml in {path}, given none"
                raise ValueError(f"--openvino: {expected}; optimum-cli export openvino writes it")
        self._genai: Any = importlib.import_module("openvino_genai")
        self._target, self._draft, self._properties = target, draft, properties
        self.variants = _OPENVINO[: 1 if draft is None else None]

    def decoder(self, key: str, eos: frozenset[int]) -> Decode:
        """Load a variant and return its call for a single prompt."""
        import openvino

        chosen: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        chosen |= self._properties
        drafts = key.endswith(_ASSISTED)
        if drafts:
            chosen["draft_model"] = self._genai.draft_model(str(self._draft), "CPU")
        pipeline = self._genai.LLMPipeline(str(self._target), "CPU", **chosen)

        def call(request: Request) -> Answer:
            (prompt,) = request.prompts
            options: dict[str, Any] = {"stop_token_ids": set(eos), "ignore_eos": not eos}
            options |= {"max_new_tokens": request.max_new_tokens}
            if request.temperature > 0:
                options |= {"do_sample": True, "temperature": request.temperature}
                options |= {"rng_seed": request.seeds[0], "top_k": 2**31 - 1, **request.filters}
            config = self._genai.GenerationConfig()
            for name, value in options.items():
                setattr(config, name, value)
            if drafts:
                config.num_assistant_tokens = _WINDOW
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            mask = openvino.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
            result = pipeline.generate(self._genai.TokenizedInputs(ids, mask), config)
            first = result.perf_metrics.get_ttft().mean / 1000
            return Answer([list(result.tokens[0])], prefill_seconds=first)

        return call


LLAMA_OPTIONS: tuple[Any, ...] = (
    ("--gguf", options.words, [], "FILE[,FILE]", "target and draft as llama.cpp has them, which "
     "answers in turns: plain, by its own rule, and with settings by which logits do not depend on "
     "the rows of a pass plain and in a chain of ours"),
    ("--llama", options.file, None, "PROGRAM", "polyspec_llama, of make llama"),
)  # fmt: skip


def engines_of(
    gguf: Sequence[str], program: Path | None, openvino: Sequence[str] = ()
) -> list[Any]:
    """Return the engines of ``--gguf`` and ``--llama``, and of ``--openvino``."""
    for name, places in (("--openvino", openvino), ("--gguf", gguf)):
        if len(places) > 2:
            raise ValueError(f"{name}: expected a target and perhaps a draft, given {len(places)}")
    if gguf and program is None:
        raise ValueError("--gguf: expected --llama PROGRAM with it, which make llama builds")
    engines: list[Any] = [OpenVino(*map(Path, openvino))] if openvino else []
    return engines + ([LlamaCpp(program, *map(Path, gguf))] if program and gguf else [])


class LlamaCpp:
    """llama.cpp in the program of ``make llama``, with GGUF files of the same vocabulary;
    `variants`: decoding methods."""

    def __init__(self, program: Path, target: Path, draft: Path | None = None) -> None:
        for name, path in (("--llama", program), ("--gguf", target), ("--gguf", draft)):
            if path is not None and not path.is_file():
                raise ValueError(f"{name}: expected a file, given {path}")
        self._program, self._target, self._draft = program.resolve(), target, draft
        self.variants = _LLAMA_CPP[: 1 if draft is None else None]
        said = subprocess.run([self._program, "--help"], capture_output=True, text=True).stdout
        lines = (line.partition("llama.cpp: ") for line in said.splitlines())
        self.version = next((rest for start, _, rest in lines if not start and rest), "unknown")

    def flags(self, key: str) -> str:
        """Return the flags of a variant."""
        (flags,) = (variant.flags for variant in self.variants if variant.key == key)
        return f"{flags} --threads {torch.get_num_threads()}"

    def decoder(self, key: str, eos: frozenset[int]) -> Decode:
        """Return a variant's call for a single prompt."""
        flags = self.flags(key)
        models = [self._target, self._draft][: 1 + (_RULE in flags)]
        command = [*map(str, [self._program, *models]), "--ids", "--json", *flags.split()]

        def call(request: Request) -> Answer:
            (prompt,) = request.prompts
            length = len(prompt) + request.max_new_tokens + 2 * _WINDOW
            words = ["--prompt", " ".join(map(str, prompt)), "--context", str(length)]
            words += ["--tokens", str(request.max_new_tokens), "--seed", str(request.seeds[0])]
            words += ["--temperature", str(request.temperature)]
            done = subprocess.run([*command, *words], capture_output=True, text=True)
            if done.returncode != 0:
                said = " ".join(done.stderr.split())
                raise RuntimeError(f"{self._program.name}: {said}")
            result = json.loads(done.stdout.splitlines()[-1])
            # The program's seconds: they exclude loading the model for every text.
            seconds, prefill = result["seconds"], result["prompt_seconds"]
            return Answer([result["ids"]], seconds=seconds, prefill_seconds=prefill)

        return call


class LlamaServer:
    """llama.cpp's server in a separate process: `slots` requests at a time, of `room` tokens each.
    `command` has no path of this machine; `version` is printed by the program."""

    def __init__(self, program: Path, flags: Sequence[str], slots: int, room: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        threads = str(torch.get_num_threads())
        words = [*flags, "-np", str(slots), "-c", str(slots * room), "-t", threads, "-tb", threads]
        words += ["--cache-ram", "0"]
        self.command = " ".join([program.name, *(Path(word).name for word in words)])
        self.version = server_version(program)
        command: list[Any] = [program, *words, "--host", "127.0.0.1", "--port", str(port)]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, **quiet)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError), _open(f"{self._url}/health", timeout=60):
                return
            time.sleep(0.2)
        raise RuntimeError(f"{self.command}: expected it to serve, given no answer")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def stream(self, request: Request) -> Iterator[list[int]]:
        """Yield the new tokens of a prompt as they arrive, without a cache of earlier prompts."""
        (prompt,), (seed,) = request.prompts, request.seeds
        filters = [name for name in ("top_k", "top_p") if name in request.filters]
        options = {"temperature": request.temperature, "samplers": [*filters, "temperature"]}
        options |= request.filters
        options |= {"prompt": prompt, "n_predict": request.max_new_tokens, "seed": seed % 2**32}
        options |= {"cache_prompt": False, "return_tokens": True, "stream": True}
        query = urllib.request.Request(f"{self._url}/completion", json.dumps(options).encode())
        query.add_header("Content-Type", "application/json")
        try:
            answer = _open(query, timeout=_START_SECONDS)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise RuntimeError(f"{self.command}: {error}: {said}") from None
        with answer:
            for line in answer:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(f"{self.command}: {event['error']}")
                    if event.get("tokens"):
                        yield event["tokens"]


def server_version(program: Path) -> str:
    """Return the line of llama.cpp's server with its version."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True)
    lines = (said.stderr + said.stdout).splitlines()
    return next((line for line in lines if line.startswith("version:")), "unknown")


def write_checkpoint(
    model: Any, path: Path, family: str, header: Callable[[Any], None] | None = None
) -> None:
    """Write a model of transformers as a GGUF file in float32, as llama.cpp's converter does.
    `header` adds to the header by its writer."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), family)
    heads, rope = config.num_attention_heads, config.rope_parameters
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {"embedding_length": config.hidden_size, "vocab_size": config.vocab_size}
    sizes |= {"feed_forward_length": config.intermediate_size, "head_count": heads}
    sizes |= {"head_count_kv": config.num_key_value_heads, "key_length": width}
    sizes |= {"block_count": config.num_hidden_layers, "value_length": width}
    sizes |= {"context_length": config.max_position_embeddings}
    sizes |= {"rope_freq_base": rope.get("full_attention", rope)["rope_theta"]}
    for name, value in (*sizes.items(), ("layer_norm_rms_eps", config.rms_norm_eps)):
        getattr(writer, f"add_{name}")(value)
    if header is not None:
        header(writer)
    else:
        writer.add_tokenizer_model("no_vocab")
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[family], config.num_hidden_layers)
    turned = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.detach().float() + (family.startswith("gemma") and "norm" in name)
        heads = turned.get(name.split(".")[-2]) if family == "llama" else None
        if heads is not None:
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(written, torch.Tensor.numpy(values.contiguous()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Engine = OpenVino | LlamaCpp
