"""``python -m polyspec_ext export gguf``: a model as a file for another engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from .. import tiny
from ..integrations import gguf
from ..levels import load_model


def add_command(commands: Any) -> None:
    """Adds ``export`` to the subcommands of a parser."""
    sub = commands.add_parser(
        "export",
        help="write a model as a GGUF file",
        description="Write a model of the Llama architecture as a file for llama.cpp, in float32 "
        "and without its vocabulary: prompts and texts are token ids there. Needs the package "
        "gguf.",
    )
    sub.add_argument("format", choices=("gguf",), help="the only one")
    sub.add_argument(
        "model", metavar="MODEL", help="model directory, or one of " + ", ".join(tiny.LEVELS)
    )
    sub.add_argument("file", metavar="FILE", type=Path, help="where to write, overwritten")
    sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file."""
    source = tiny.path(args.model) if args.model in tiny.LEVELS else args.model
    model = load_model(source, torch.float32, blocks=False, name="MODEL")
    gguf.write_gguf(model, args.file)
    print(args.file)
    return 0
