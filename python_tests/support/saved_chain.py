"""A folder as `make demo` finds the shipped models: three random models and a real tokenizer."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polyspec_ext import tiny
from training import tiny_models

TEXT = [tiny.prompt_of("How many apples are 3 apples and 4 apples?") + " 3 + 4 = 7 apples.\n#### 7"]


def save(root: Path) -> Path:
    """Writes target, middle and drafter below `root`, for POLYSPEC_TINY; returns it."""
    tokenizer = tiny_models.train_tokenizer(TEXT)
    for seed, (level, layers) in enumerate((("target", 2), ("middle", 1), ("drafter", 1))):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        model.save_pretrained(root / level)
        tokenizer.save_pretrained(root / level)
    return root
