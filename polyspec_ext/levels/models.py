"""Models of `transformers` in levels: their properties, tokenizers and changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import arguments, rooms
from ..kv_cache import device_of, name_of
from ..ops.decoder import take_rows
from ..tensors import IdMap
from . import base
from .fused import Runs, packed, unpacked
from .products import TrimmedHead, is_plain_tensor, without_wrapper

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Fields of a generation_config.json that change texts, and the values that change none.
_OF_TEXTS: dict[str, object] = {
    "do_sample": False, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0,
    "repetition_penalty": 1, "top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None, "sequence_bias": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "min_length": 0, "min_new_tokens": 0,
    "num_beams": 1, "guidance_scale": 1, "stop_strings": None,
}  # fmt: skip


class ModelLevel:
    """A model of `transformers` in eval mode, with logits that `verify` can read.

    Args:
        name: for messages and statistics; None: the model's name or class.
        pack: whether passes run on packed weights; None: they run `model` unchanged.
        packs_as: a packed level; this one may share modules of its model.
        options: further arguments of the level's constructor, for copies.

    Attributes:
        no_trees: reason why it reads no trees of tokens, or None.
        device: of tokens and logits.
        hidden_size, num_layers: width of its hidden states, and number of its decoder layers.
        vocab_size: exclusive upper bound of input ids.
        id_map: map of the ids with logits, if its head was trimmed; None: all ids.
        max_length: maximum context; None: no limit.
        copies: of the model's modules (`Runs.copies`).
    """

    no_trees: str | None

    def __init__(
        self,
        model: PreTrainedModel,
        name: str | None,
        pack: bool | None = None,
        packs_as: ModelLevel | None = None,
        **options: Any,
    ) -> None:
        arguments.model("model", model)
        arguments.label("name", name)
        model = without_wrapper(model)
        self.model, self.name = model, name or name_of(model)
        self._options = options if pack is None else {"pack": pack, **options}
        self.pack = bool(pack)
        if model.training:
            raise ValueError(
                f"{self.name}: expected a model in eval mode, given one in training mode; call "
                "model.eval()"
            )
        self.device = device_of(model)
        _require_logits(model, self.device, self.name)
        require_no_autocast(self.device, self.name)
        config = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings()
        self.id_map: IdMap | None = None
        self.vocab_size = int(getattr(head, "out_features", None) or config.vocab_size)
        if isinstance(head, TrimmedHead):
            self.vocab_size = head.vocab_size
            self.id_map = IdMap(head.vocab_size, head.drawn)
        longest = getattr(config, "max_position_embeddings", None)
        # -1 in some configurations: any length.
        self.max_length: int | None = longest if longest is not None and longest > 0 else None
        # Modules that passes run; `model` is not replaced.
        runs = Runs(model)
        if pack is not None:
            known = {} if packs_as is None else packs_as.copies
            runs = packed(model, self.name, known) if pack else unpacked(model, self.name)
        self._runs, self.varies = runs.model, runs.varies
        self.copies: Mapping[int, nn.Module] = runs.copies
        self._unchanged = Unchanged(model, self.name, copied=self._runs is not model)
        self.hidden_size = int(config.hidden_size)
        self.num_layers = len(decoder_layers(self._runs, int(config.num_hidden_layers))[1])
        parameters = inspect.signature(model.forward).parameters
        self._slices, self._placed = "logits_to_keep" in parameters, "position_ids" in parameters
        self._cache_name = cache_name(model)

    def __repr__(self) -> str:
        kinds = type(self).__name__, type(self.model).__name__
        return f"{kinds[0]}({self.name}: {kinds[1]}, {level_line(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Let `copy` and `pickle` construct the level again over a copy of its model, with an empty
        cache."""
        return _restored, (type(self), self.model, {**self._options, "name": self.name})

    def keep_path(self, begin: Any, path: Tensor, lengths: Any) -> Sequence[int]:
        """Refuse to keep the path of a tree, because the level reads no trees."""
        raise ValueError(f"{self.name}: expected no tree to have been read: {self.no_trees}")

    @functools.cached_property
    def states(self) -> rooms.states.StateHooks:
        """Reader of the hidden states of passes."""
        return rooms.states.StateHooks(self._runs)

    def stamp(self) -> object:
        """Return the stamp of the model (`Unchanged.stamp`)."""
        return self._unchanged.stamp()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, from the generation configuration."""
        return eos_ids(self.model)

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, from the generation configuration or else the model's."""
        return next(iter(_ids_of(self.model, "bos_token_id")), None)

    @property
    def pad_token_id(self) -> int | None:
        """Id of padding, likewise; None if it also ends a text, so that it may be of the text."""
        padding = next(iter(_ids_of(self.model, "pad_token_id")), None)
        return None if padding in self.eos_token_ids else padding

    @property
    def generation_config(self) -> dict[str, Any]:
        """The fields of generation_config.json that change texts, but for their ends."""
        config = getattr(self.model, "generation_config", None)
        values = {name: getattr(config, name, None) for name in _OF_TEXTS}
        return {
            name: value
            for name, value in values.items()
            if value is not None and value is not False and value != _OF_TEXTS[name]
        }

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Load the tokenizer beside the model's weights, or None. Never asks the network."""
        path = getattr(self.model, "name_or_path", "")
        with contextlib.suppress(ValueError):
            return tokenizer_at(path, local=True) if path else None
        return None


def _restored(kind: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
    # `copy` copies arguments of a function, so a copy shares the cache of the owner's copy.
    return kind(model, **options)


def eos_ids(model: Any) -> tuple[int, ...]:
    """Return the ids that end a text, from the generation configuration or else the model's."""
    return _ids_of(model, "eos_token_id")


def _ids_of(model: Any, name: str) -> tuple[int, ...]:
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, name, None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def is_encoder_decoder(model: Any) -> bool:
    """Return whether a model of `transformers` has an encoder that reads tokens for its decoder."""
    config = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not getattr(config, "is_encoder_decoder", False):
        return False
    parameters = inspect.signature(model.forward).parameters
    return {"input_ids", "decoder_input_ids", "encoder_outputs"} <= set(parameters)


def cache_name(model: Any) -> str:
    """Return the name of the cache among a model's arguments: ``cache`` from transformers 5.24 on,
    ``past_key_values`` before it and of a user's model."""
    names = inspect.signature(model.forward).parameters
    known = ("past_key_values", "cache", "cache_params")
    return next((name for name in known if name in names), known[0])


def _require_logits(model: PreTrainedModel, device: torch.device, name: str) -> None:
    """Refuse a model with logits that `verify` cannot read, as far as its head shows."""
    # Weights that accelerate has offloaded are on the meta device between passes.
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    missing = not offloaded and any(p.is_meta for p in model.parameters())
    if missing or device.type == "meta":
        raise ValueError(f"{name}: expected a model with its weights, given one on the meta device")
    arguments.supported_device(f"{name}: device", device)
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    kind = weight.dtype if isinstance(weight, Tensor) else torch.float32
    # The dtype of a quantised head's products does not follow from its weights.
    shown = type(head) is nn.Linear or kind == torch.float64
    if shown and kind not in arguments.LOGITS_DTYPES:
        raise ValueError(
            f"{name}: expected a model whose logits are float32, bfloat16 or float16, given a head "
            f"of {kind}"
        )


# ---- descriptions of levels ----------------------------------------------------------------------


def level_line(level: Any) -> str:
    """Describe a level's model, as in ``1.3M parameters, float32, cpu``, and how it runs; a level
    without a torch model by class, vocabulary and device."""
    model: Any = getattr(level, "model", None)
    if not isinstance(model, nn.Module):
        return f"{type(level).__name__}, vocabulary of {level.vocab_size}, {base.device_of(level)}"
    weights = list(model.parameters())  # tied weights once
    plain = [weight for weight in weights if weight.dtype.is_floating_point]
    count = num_parameters(level) or 0
    units = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
    short = (f"{count / size:.1f}{unit}" for size, unit in units if count >= size)
    devices = _distinct(weight.device for weight in weights) or str(base.device_of(level))
    how = ["packed"] if getattr(level, "pack", False) is True else []
    varies = getattr(level, "varies", None)
    if varies is not None:
        how.append("block-invariant" + (f" but for {' and '.join(varies)}" if varies else ""))
    kinds = _distinct(weight.dtype for weight in plain)
    words = f"{next(short, str(count))} parameters", kinds, devices, *how
    return ", ".join(word for word in words if word)


def num_parameters(level: Any) -> int | None:
    """Count the parameters of a level's model, quantised layers included, a tied head once; None:
    no torch model."""
    model: Any = getattr(level, "model", None)
    if not isinstance(model, nn.Module):
        return None
    plain = sum(weight.numel() for weight in model.parameters() if weight.dtype.is_floating_point)
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    heads = [level.model.get_output_embeddings()] if tied else []
    return plain + sum(_quantised(model)) - sum(count for h in heads for count in _quantised(h))


def has_quantised_layers(model: nn.Module) -> bool:
    """Return whether any linear layer has no plain weights, quantised by any library."""
    return any(True for _ in _quantised(model))


def is_sharded(thing: Any) -> bool:
    """Return whether the weights of a model, or of a level's model, are sharded over processes
    (`torch.distributed.tensor.DTensor`)."""
    model = thing if isinstance(thing, nn.Module) else getattr(thing, "model", None)
    weights = model.parameters() if isinstance(model, nn.Module) else ()
    return any(getattr(weight, "device_mesh", None) is not None for weight in weights)


def _quantised(model: nn.Module) -> Iterator[int]:
    """Yield the number of weights of each linear layer without plain weights."""
    for module in model.modules():
        inputs, outputs = (getattr(module, f"{end}_features", None) for end in ("in", "out"))
        if isinstance(inputs, int) and isinstance(outputs, int):
            weight, count = getattr(module, "weight", None), inputs * outputs
            if (
                not isinstance(weight, Tensor)
                or not weight.is_floating_point()
                or weight.numel() != count
            ):
                yield count


def _distinct(values: Any) -> str:
    return " and ".join(sorted({str(value).removeprefix("torch.") for value in values}))


# ---- files and tokenizers ------------------------------------------------------------------------

GGUF_MAGIC = b"GGUF"


def path_of(location: str | Path) -> Path:
    """Return a path; a leading tilde is expanded to the user's folder."""
    path = Path(location)
    try:
        return path.expanduser()
    except RuntimeError:  # no such user
        return path


def begins(path: Path, first: bytes) -> bool:
    """Return whether a file begins with the bytes `first`."""
    try:
        with path.open("rb") as file:
            return file.read(len(first)) == first
    except OSError:
        return False


def is_gguf(location: object) -> bool:
    """Return whether a path is a GGUF file, by its name or its first bytes."""
    if not isinstance(location, str | Path):
        return False
    path = path_of(location)
    return path.is_file() and (path.suffix.lower() == ".gguf" or begins(path, GGUF_MAGIC))


def tokenizer_at(location: str | Path, local: bool = False) -> Any:
    """Load the tokenizer beside a model's weights, or in its GGUF file. With `local`, never use the
    network.

    Raises:
        ValueError: no tokenizer loads, or it has special tokens alone, as transformers constructs
            it from the configuration of a folder without a tokenizer's files.
    """
    from transformers import AutoTokenizer

    path = path_of(location)
    try:
        if is_gguf(path):
            file = rooms.gguf.first_part(path)
            about = file.stat()
            return copy.deepcopy(_in_file(file.resolve(), about.st_mtime_ns, about.st_size))
        source = str(path if path.exists() else location)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
    except (OSError, ValueError, KeyError, TypeError, ImportError, NotImplementedError) as error:
        raise ValueError(
            f"expected a tokenizer beside the model, given none that loads in {location}: {error}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(f"expected a tokenizer beside the model, given none in {location}")
    return tokenizer


@functools.lru_cache(maxsize=4)
def _in_file(file: Path, *_: int) -> Any:
    # Cached, since construction takes seconds.
    return rooms.gguf.tokenizer_of(rooms.gguf.GgufFile(file))


# ---- changes of a level's model ------------------------------------------------------------------

# Hooks of transformers record requested outputs, and hooks of this package exist within a pass
# only.
_PASSING = ("transformers.", "polyspec_ext.")
# Attributes of peft's layers that say which adapters act, and how much.
_ADAPTERS = frozenset({"_active_adapter", "_disable_adapters", "merged_adapters", "scaling"})
_SAMPLED = 4  # compared rows and columns of a packed matrix


def require_no_autocast(device: torch.device, name: str) -> None:
    """Refuse `torch.autocast` on `device`."""
    if torch.is_autocast_enabled(device.type):
        raise ValueError(
            f"{name}: expected a call outside torch.autocast, given one inside "
            f"torch.autocast({device.type!r}), where layers and caches have several data types; "
            "load the model in the type that is wanted"
        )


def changes_of(model: nn.Module) -> list[tuple[int, int]]:
    """Return the address and the count of changes of each parameter and buffer."""
    tensors = [*model.parameters(), *model.buffers()]
    return [
        (x.data_ptr() if is_plain_tensor(x) else id(x), 0 if x.is_inference() else x._version)
        for x in tensors
    ]


class Unchanged:
    """Modes, sizes and types of a level's model at construction, for comparison later. `copied`:
    also hooks, modules and weights, because passes run a copy of the modules, with copies of linear
    weights."""

    def __init__(self, model: Any, name: str, *, copied: bool = False) -> None:
        self._model, self._name, self._copied = model, name, copied
        self._modules = list[nn.Module](model.modules())
        self._some = [  # views of some values of each linear weight
            weight.detach()[tuple(slice(None, None, max(1, n // _SAMPLED)) for n in weight.shape)]
            for layer in self._modules
            if type(layer) is nn.Linear
            for weight in layer.parameters(recurse=False)
            if is_plain_tensor(weight)
        ]
        self._before = self._facts()

    def stamp(self) -> object:
        """Return the parts of passes, for comparison: modules, hooks, active adapters,
        and addresses, changes and some values of the weights."""
        modules = list(self._model.modules())
        adapters = [repr(vars(m)[x]) for m in modules for x in _ADAPTERS.intersection(vars(m))]
        return self._contents(modules), changes_of(self._model), adapters

    def require(self) -> None:
        """Refuse a call of a changed model, and a call under `torch.autocast`."""
        require_no_autocast(device_of(self._model), self._name)
        now = self._facts().items()
        changed = next((key for key, value in now if value != self._before[key]), None)
        if changed is None:
            return
        hint = "make the level anew"
        if changed == "training modes" and self._model.training:
            hint = "call model.eval()"
        elif changed in ("hooks", "modules", "weights"):
            hint += ", without pack where they are to change between calls"
        raise ValueError(
            f"{self._name}: expected the model as it was when its level was made, given one with "
            f"other {changed}; {hint}"
        )

    def _facts(self) -> dict[str, Any]:
        model = self._model
        head, embeds = model.get_output_embeddings(), model.get_input_embeddings()
        sizes = getattr(head, "out_features", None), getattr(embeds, "num_embeddings", None)
        facts: dict[str, Any] = {
            "training modes": [module.training for module in self._modules],
            "embeddings": (head, *sizes),
            "data types or devices": (model.dtype, device_of(model)),
        }
        return facts | (self._contents(self._modules) if self._copied else {})

    def _contents(self, modules: Sequence[nn.Module]) -> dict[str, Any]:
        hooks = [
            number
            for module in modules
            for table in (module._forward_pre_hooks, module._forward_hooks)
            for number, hook in table.items()
            if not str(getattr(hook, "__module__", "")).startswith(_PASSING)
        ]
        plain = filter(is_plain_tensor, self._model.parameters())
        with torch.inference_mode():
            values = [view.contiguous().flatten().view(torch.uint8) for view in self._some]
            some = torch.cat(values).cpu().numpy().tobytes() if values else b""
        return {
            "hooks": hooks,
            "modules": [(dict(m._modules), m.__dict__.get("forward")) for m in modules],
            "weights": ([x.data_ptr() for x in plain], some),
        }


# ---- parts of passes -----------------------------------------------------------------------------


def decoder_layers(model: nn.Module, count: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    """Return the module that has the decoder layers, and the layers: the first list of `count`
    modules (the configuration's number); without a matching list, the model and no layers."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, list(child)
    return model, ()


@contextmanager
def gathering(head: torch.nn.Module, first: Tensor | None, keep: int) -> Iterator[None]:
    """Pass only `keep` hidden states from ``first[b]`` on to `head`, because logits of all tokens
    would be large; None: all states. The model's processing of its logits still applies."""
    if first is None:
        yield
        return
    pending: list[Tensor] = [first]
    thread = threading.get_ident()

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        # Once, because a hook left by an interrupt must not change later passes; and in this
        # thread, because chains of other threads may run the same model.
        if not pending or threading.get_ident() != thread:
            return arguments
        states, begin = arguments[0], pending.pop()
        begin = begin.to(states.device, non_blocking=True)
        return (take_rows(states, begin, None, 0, keep, False), *arguments[1:])

    handle = None
    try:
        handle = head.register_forward_pre_hook(hook, prepend=True)
        yield
    finally:
        pending.clear()
        if handle is not None:
            handle.remove()
