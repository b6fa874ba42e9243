"""Small random models of several families, copies of them a little off, and their greedy texts."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

V = 96

# Of all families that name their sizes alike; two heads for keys and values where they differ.
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}


def _config(kind: Any, **sizes: Any) -> Callable[[int, int], Any]:
    return lambda n, v: kind(vocab_size=v, num_hidden_layers=n, **sizes)


# Family -> the configuration of a small model of so many layers and ids.
FAMILIES: dict[str, Callable[[int, int], Any]] = {
    "llama": _config(hf.LlamaConfig, **_GROUPED),
    "qwen2": _config(hf.Qwen2Config, **_GROUPED),
    "qwen3": _config(hf.Qwen3Config, **_GROUPED, head_dim=8),
    "gpt2": lambda n, v: hf.GPT2Config(
        vocab_size=v, n_embd=32, n_layer=n, n_head=4, n_positions=128
    ),
    "opt": _config(
        hf.OPTConfig,
        hidden_size=32,
        ffn_dim=48,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=128,
    ),
    "pythia": _config(hf.GPTNeoXConfig, **_SIZES, max_position_embeddings=128),
    # Sliding windows shorter than the text: the level keeps everything and lets the mask hide it.
    "mistral, sliding window": _config(hf.MistralConfig, **_GROUPED, sliding_window=8),
    "gemma2, sliding window": _config(hf.Gemma2Config, **_GROUPED, head_dim=8, sliding_window=8),
}


def make(family: str, layers: int = 2, seed: int = 0, vocab: int = V, **sizes: int) -> Any:
    """A random model, sharp enough that greedy texts are not all the same token."""
    torch.manual_seed(seed)
    config = FAMILIES[family](layers, vocab)
    vars(config).update(sizes)
    config.tie_word_embeddings = False  # tied random weights repeat their input
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    return sharp(hf.AutoModelForCausalLM.from_config(config).float().eval())


@torch.no_grad()
def sharp(model: Any, deviation: float = 0.25) -> Any:
    """Return the model with other matrices, with clearly different positions."""
    for p in model.parameters():
        if p.dim() > 1:
            p.normal_(0, deviation)
    return model


def llama(seed: int, layers: int, vocab: int, **config: Any) -> Any:
    """A random Llama as its configuration initialises it."""
    torch.manual_seed(seed)
    sizes = {**_GROUPED, "vocab_size": vocab, "num_hidden_layers": layers, **config}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval()


def wide(family="llama", seed=0, dtype=torch.float32, **more) -> Any:
    """Return a random model with heads, norms and biases for packed levels."""
    sizes = {
        "vocab_size": 97, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = hf.CONFIG_MAPPING[family](**{**sizes, **more})
    model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(torch.randn_like(p) / 4)
    return model


@torch.no_grad()
def plain_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(
            int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        )
    return tokens


PROMPT = [5, 17, 80, 3, 3, 41]


def rough(model: Any, amount: float = 0.03, seed: int = 1) -> Any:
    """A copy with weights a little off, as quantisation leaves them."""
    other = copy.deepcopy(model)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p += amount * torch.randn(p.shape, generator=random)
    return other


def keys_of(cache: Any, row: int, length: int) -> torch.Tensor:
    """``[layers, heads, length, D]``, the keys of one row of a cache."""
    return torch.stack([layer.keys[row, :, :length] for layer in cache.layers])
