"""Does it fit? A target, its 4-bit copy and a draft as one chain, and the memory that they take.

The target has random weights, so a shape is all that is needed of it. As large as Qwen2.5-7B:

    python examples/fits_in_memory.py --draft w4:Qwen/Qwen2.5-Coder-0.5B-Instruct \\
        --hidden 3584 --inner 18944 --layers 28 --heads 28 --kv-heads 4
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import polyspec_ext as ps
from polyspec_ext import tiny


def write_random(folder: Path, config: Any) -> None:
    """A checkpoint of random bfloat16 weights, a file for each, so that none needs them all."""
    torch.manual_seed(0)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files: dict[str, str] = {}
    for name, weight in model.named_parameters():
        made = torch.empty(weight.shape, dtype=torch.bfloat16)
        made.fill_(1) if "norm" in name else made.normal_(0, 0.02)
        files[name] = f"{len(files):05}.safetensors"
        save_file({name: made}, folder / files[name], {"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index)


def own_gigabytes() -> float:
    """Memory of this process but for pages of files, which the system takes back where it must."""
    status = Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", default=str(tiny.path("drafter")), help="model or w4:model")
    for name, size in (("hidden", 256), ("inner", 512), ("layers", 2), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for the checkpoint")
    args = parser.parse_args()

    draft = args.draft.removeprefix("w4:")
    tokenizer = AutoTokenizer.from_pretrained(draft)
    config = AutoConfig.from_pretrained(draft, dtype="bfloat16")
    config.update({
        "hidden_size": args.hidden,
        "intermediate_size": args.inner,
        "num_hidden_layers": args.layers,
        "layer_types": ["full_attention"] * args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden // args.heads,
        "tie_word_embeddings": False,
    })  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # copies are kept there
        write_random(Path(folder), config)
        tokenizer.save_pretrained(folder)
        chain = ps.Chain([folder, "w4", args.draft], window=[4, 4], dtype="auto", pack=True)
        print(chain)
        output = chain.generate(list(range(10, 42)), max_new_tokens=16)
        print(f"passes of the target: {output.stats.levels[0].num_forward_passes}")
        print(f"{own_gigabytes():.1f} GB")


if __name__ == "__main__":
    main()
