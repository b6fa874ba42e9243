"""The paper's models: which they are, and whether they are on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from polyspec_ext.drafters import checkpoint
from polyspec_ext.levels import is_gguf
from polyspec_ext.quantization.stored import copy_prefix, original


class Preset(NamedTuple):
    """A target, its EAGLE-2 head and how that drafts (SafeAILab's own settings: top-k 10, depth 6,
    fewer tokens the dearer the target's passes are). Its 4-bit copy is made of the target.

    Attributes:
        target, eagle2: ids on the Hugging Face hub.
        template: of `conversation.TEMPLATES`.
        total_tokens: of the head's trees.
    """

    target: str
    eagle2: str
    template: str
    total_tokens: int = 60


_GATED = "meta-llama/"  # whose licence has to be accepted on the hub before
PRESETS = {
    "vicuna-7b": Preset("lmsys/vicuna-7b-v1.3", "yuhuili/EAGLE-Vicuna-7B-v1.3", "vicuna"),
    "vicuna-13b": Preset("lmsys/vicuna-13b-v1.3", "yuhuili/EAGLE-Vicuna-13B-v1.3", "vicuna", 50),
    "llama2-7b": Preset(f"{_GATED}Llama-2-7b-chat-hf", "yuhuili/EAGLE-llama2-chat-7B", "chat"),
    "llama2-70b": Preset(
        f"{_GATED}Llama-2-70b-chat-hf", "yuhuili/EAGLE-llama2-chat-70B", "chat", 48
    ),
    "llama3-8b": Preset(
        f"{_GATED}Meta-Llama-3-8B-Instruct", "yuhuili/EAGLE-LLaMA3-Instruct-8B", "chat"
    ),
    "qwen2-7b": Preset("Qwen/Qwen2-7B-Instruct", "yuhuili/EAGLE-Qwen2-7B-Instruct", "chat"),
}


class MissingModelsError(Exception):
    """Models that a command needs and this machine does not have.

    Attributes:
        commands: what fetches them, one line each.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self.commands = [f"hf download {place}" for place in places]
        if any(place.startswith(_GATED) for place in places):
            self.commands.insert(0, "hf auth login  # with the model's licence accepted on the hub")
        super().__init__("expected models on this machine, given none for " + ", ".join(places))


def local(place: str) -> Path | None:
    """The folder of a model with its weights in it: `place` itself, or what the hub's cache has
    under that id; or a GGUF file. None: it is not on this machine, or not all of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if is_gguf(place):
        return Path(place)
    folder = Path(place)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(place, local_files_only=True))
        files = checkpoint.weight_files(folder)
    except (LocalEntryNotFoundError, ValueError):  # (An id that is none is a ValueError.)
        return None
    return folder if all(file.is_file() for file in (folder / "config.json", *files)) else None


def require(places: Sequence[str]) -> list[str]:
    """The folders or GGUF files of models, by path or id; of their 4-bit copies with ``w4:`` in
    front, as given.

    Raises:
        MissingModelsError: some are not on this machine.
    """
    pairs = [(place, local(str(original(place)))) for place in places]
    missing = [place for place, folder in pairs if folder is None]
    if missing:
        raise MissingModelsError(list(dict.fromkeys(missing)))
    return [f"{copy_prefix(place)}{folder}" for place, folder in pairs]
