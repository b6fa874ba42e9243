"""Levels and tokenizers of GGUF files against llama.cpp's library, where it is available."""

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import native_builds
import numpy as np
import pytest
import torch
import transformers as hf

from benchmarks.engines import write_checkpoint
from polyspec_ext.levels import load, tokenizer_at

pytest.importorskip("gguf")

pytestmark = [
    native_builds.needs_tools,
    pytest.mark.slow,
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"),
        reason="llama.cpp's prebuilt library is for Linux on x86-64",
    ),
]
Truth = Callable[..., str]
IDS = [5, 17, 80, 3, 9, 11, 40, 2, 8] * 3
CANNOT_BE_HAD = 3


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    get = native_builds.EXAMPLES / "llama_cpp" / "get.py"
    done = native_builds.run(sys.executable, get, "llama.cpp", check=False)
    if done.returncode == CANNOT_BE_HAD:
        pytest.skip(done.stderr.strip())
    folder = Path(done.stdout.strip())
    program = tmp_path_factory.mktemp("truth") / "llama_truth"
    native_builds.run(
        native_builds.CXX, "-std=c++17", "-O1", "-o", program,
        Path(__file__).parents[1] / "support" / "llama_truth.cpp",
        f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-lllama", "-lggml",
        "-l:libggml-base.so", f"-Wl,-rpath,{folder / 'lib'}",
    )  # fmt: skip

    def ask(*words: object, text: str = "") -> str:
        return subprocess.run(
            [program, *map(str, words)],
            env={"LLAMA_BACKENDS": str(folder / "lib")},
            input=text,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    return ask


def window(writer: Any) -> None:
    writer.add_tokenizer_model("no_vocab")
    writer.add_sliding_window(8)


def scaled(writer: Any) -> None:
    window(writer)
    writer.add_rope_scaling_factor(8.0)


def linear(writer: Any) -> None:
    writer.add_tokenizer_model("no_vocab")
    writer.add_float32("llama.rope.scale_linear", 4.0)


GEMMA: dict[str, Any] = {"head_dim": 16, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("kind", "family", "header", "config"),
    [
        ("Llama", "llama", None, {}),
        ("Llama", "llama", None, {"attention_bias": True, "mlp_bias": True}),
        ("Llama", "llama", linear, {"tie_word_embeddings": True}),
        ("Qwen2", "qwen2", None, {}),
        ("Qwen3", "qwen3", None, {"head_dim": 32}),
        ("Gemma", "gemma", None, GEMMA),
        ("Gemma2", "gemma2", window, GEMMA),
        ("Gemma2", "gemma2", window, {**GEMMA, "num_hidden_layers": 46, "num_attention_heads": 2}),
        ("Gemma3", "gemma3", window, {**GEMMA, "num_hidden_layers": 7}),
        ("Gemma3", "gemma3", scaled, {**GEMMA, "num_hidden_layers": 7}),
        ("Gemma3", "gemma3", window, {**GEMMA, "num_hidden_layers": 62, "num_attention_heads": 2}),
    ],
)
def test_logits(truth, kind, family, header, config, tmp_path) -> None:
    form = getattr(hf, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    model = getattr(hf, f"{kind}ForCausalLM")(form(**{**sizes, **config})).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.1) if p.dim() > 1 or "bias" in name else p.add_(torch.randn_like(p) / 5)
    file = tmp_path / "model.gguf"
    write_checkpoint(model, file, family, header)
    wanted = torch.from_numpy(np.fromstring(truth(file, *IDS), sep=" ")).view(len(IDS), -1)
    with torch.inference_mode():
        given = load(file).model(input_ids=torch.tensor([IDS])).logits[0].double()
    # The GELU of Gemma is read from a table of half precision there.
    limit = 1e-2 if family.startswith("gemma") else 1e-4
    assert (given - wanted).abs().max() < limit * wanted.std()


ALPHABET = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
ALPHABET += [chr(256 + i) for i in range(256 - len(ALPHABET))]
MERGES = ["1 2", "12 3", "' t", "' T", "l l", "' ll", "W o", "h e", "T P", "H T", "HT TP", "Ġ Ġ",
          "ĠĠ Ġ", "Ċ Ċ", "c 1", "_ b", ". b", "( )", "Ġ h", "Ġh e", "Ġ y", "ĠĠ y", "d o", "n '",
          "l o", "he ll", "hell o", "hello W"]  # fmt: skip
TEXTS = ["hello World", "  hello", "123 45 6789", "don't DON'T we'll", "helloWorld HTTPServer",
         "a  b   c", "x\n\n  y", "\n\nhi", "日本語テキスト", "abc123def", "foo_bar.baz()",
         "Ünï é 🙂", "<s>a</s> b", "hi<|im_end|>\n", "", " ", "\t\r\n"]  # fmt: skip


def bytes_of(pre: str, **flags: bool) -> Callable[[Any], None]:
    def header(writer: Any) -> None:
        merged = ("".join(merge.split()) for merge in MERGES)
        tokens = [*ALPHABET, *merged, "<s>", "</s>", "<|im_end|>"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * (len(tokens) - 3) + [3] * 3)
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(len(tokens) - 3)
        writer.add_eos_token_id(len(tokens) - 2)
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return header


def pieces(**flags: bool) -> Callable[[Any], None]:
    def header(writer: Any) -> None:
        known = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "<|im_end|>"]
        words = ["▁hello", "hello", "hell", "▁h", "he", "ll", "▁W", "or", "▁▁", "▁a", "12"]
        words += [*"helowrdab", "▁", "1", "2", "3", "W", "t", "n", "'"]
        tokens = [*known, *words]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(known) + [-float(i) for i in range(len(words))])
        writer.add_token_types([2, 3, 3, *[6] * 256, 4, *[1] * len(words)])
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return header


SPEAKER = hf.LlamaConfig(
    vocab_size=400, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=4,
)  # fmt: skip
PRE = [
    "llama-bpe",
    "smaug-bpe",
    "qwen2",
    "tekken",
    "deepseek-coder",
    "smollm",
    "starcoder",
    "gpt-2",
]


@pytest.mark.parametrize(
    "header",
    [
        *(bytes_of(pre) for pre in PRE),
        bytes_of("llama-bpe", add_bos_token=False),
        bytes_of("smollm", add_bos_token=True, add_eos_token=True),
        pieces(),
        pieces(add_space_prefix=False),
        pieces(add_bos_token=False, add_eos_token=True),
    ],
    ids=[*PRE, "no BOS", "BOS and EOS", "pieces", "no space", "no BOS of pieces"],
)
def test_ids(truth: Truth, header: Callable[[Any], None], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_checkpoint(hf.LlamaForCausalLM(SPEAKER), file, "llama", header)
    lines = truth("-t", file, text="\0".join(TEXTS)).splitlines()
    tokenizer = tokenizer_at(file)
    for text, line in zip(TEXTS, lines, strict=True):
        assert tokenizer(text)["input_ids"] == [int(i) for i in line.split()], text


@pytest.mark.parametrize("pre", ["default", "deepseek-llm", "of tomorrow"])
def test_text_of_an_unknown_rule_is_refused(pre: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_checkpoint(hf.LlamaForCausalLM(SPEAKER), file, "llama", bytes_of(pre))
    with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.pre: expected .*given '{pre}'"):
        tokenizer_at(file)
    assert load(file).tokenizer() is None
