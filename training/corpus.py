"""The text the shipped models are trained on, and their tokenizer.

Two public sources: GSM8K's training split (MIT) and Tiny Shakespeare (public domain). GSM8K's
calculator annotations ``<<48/2=24>>`` are removed, so that a solution reads as prose.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from polyspec_ext.tiny import CHAT_TEMPLATE, prompt_of

from .texts import Document

BOS, EOS = "<|bos|>", "<|eos|>"
VOCAB_SIZE = 2048
LENGTH = 320  # tokens per training row; a GSM8K problem with its solution has about 200
_CALCULATOR = re.compile(r"<<[^>]*>>")


def texts(folder: Path) -> list[str]:
    """Return the texts to learn."""
    return gsm8k(folder / "gsm8k_train.jsonl") + shakespeare(folder / "tinyshakespeare.txt")


def held_out(folder: Path) -> list[str]:
    """Return the texts that models are reported on."""
    return gsm8k(folder / "gsm8k_test.jsonl")[:300]


def gsm8k(path: Path) -> list[str]:
    """Documents ``Question: ...\\nAnswer: ...\\n#### n`` of one GSM8K split (a ``.jsonl`` file)."""
    documents = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answer = _CALCULATOR.sub("", row["answer"]).strip()
        documents.append(f"{prompt_of(row['question'])} {answer}")
    return documents


def shakespeare(path: Path) -> list[str]:
    """Passages of six consecutive speeches, split at the blank lines between speakers."""
    parts = path.read_text(encoding="utf-8").split("\n\n")
    return ["\n\n".join(parts[i : i + 6]).strip() for i in range(0, len(parts), 6)]


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `VOCAB_SIZE` ids; digits stay apart so that arithmetic is
    learnable."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[Document]:
    """Encode ``bos ... eos`` of each, all of which is learnt."""
    rows = tokenizer(documents)["input_ids"]
    return [Document(torch.tensor([*row, tokenizer.eos_token_id])) for row in rows]
