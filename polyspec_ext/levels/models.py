"""Inspect models of `transformers` for levels: their properties, tokenizers, changes and hidden
states, and whether cached passes give the logits of a single pass over the whole text."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import arguments, rooms
from ..files import is_gguf, path_of
from ..kv_cache import device_of, name_of
from ..tensors import IdMap, RowCounts, gather, padded
from . import base
from .base import InputBlock
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
        options: further arguments of the level's constructor, for copies.

    Attributes:
        no_trees: reason why it reads no trees of tokens, or None.
        device: of tokens and logits.
        hidden_size, num_layers: width of its hidden states, and number of its decoder layers.
        vocab_size: exclusive upper bound of input ids.
        id_map: map of the ids with logits, if its head was trimmed; None: all ids.
        max_length: maximum context; None: no limit.
    """

    no_trees: str | None

    def __init__(
        self, model: PreTrainedModel, name: str | None, pack: bool | None = None, **options: Any
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
            runs = packed(model, self.name) if pack else unpacked(model, self.name)
        self._runs, self.varies = runs
        self._unchanged = Unchanged(model, self.name, copied=self._runs is not model)
        self._states = HiddenStates(self._runs)
        self.hidden_size, self.num_layers = int(config.hidden_size), self._states.count
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
        return _id_of(self.model, "bos_token_id")

    @property
    def pad_token_id(self) -> int | None:
        """Id of padding, likewise; None if it also ends a text, so that it may be of the text."""
        padding = _id_of(self.model, "pad_token_id")
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
        path, loaded = getattr(self.model, "name_or_path", ""), None
        with contextlib.suppress(ValueError):
            loaded = tokenizer_at(path, local=True) if path else None
        return loaded


def _restored(kind: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
    return kind(model, **options)


def eos_ids(model: Any) -> tuple[int, ...]:
    """Return the ids that end a text, from the generation configuration or else the model's."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def _id_of(model: Any, name: str) -> int | None:
    for config in (getattr(model, "generation_config", None), model.config):
        if isinstance(value := getattr(config, name, None), int):
            return value
    return None


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


# ---- tokenizers ----------------------------------------------------------------------------------


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
            file = rooms.first_part(path)
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
    return rooms.tokenizer_of(rooms.GgufFile(file))


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
    """Modes, sizes and types of a level's model at construction, for comparison later.

    Args:
        copied: passes run a copy of the model's modules, without later hooks and modules, and with
            copies of linear weights. Hooks, modules and weights are then compared as well.
    """

    def __init__(self, model: Any, name: str, *, copied: bool = False) -> None:
        self._model, self._name, self._device = model, name, device_of(model)
        self._copied = copied
        self._modules: list[nn.Module] = list(model.modules())
        # Modules with weights that packed passes do not look up again, and views of some weights.
        linear = (layer for layer in self._modules if type(layer) is nn.Linear)
        self._bound = [layer for layer in linear if is_plain_tensor(layer.weight)]
        self._sampled: dict[torch.dtype, list[Tensor]] = {}
        for weight in self._bound_weights():
            steps = [max(1, size // _SAMPLED) for size in weight.shape]
            view = weight.detach()[tuple(slice(None, None, step) for step in steps)]
            self._sampled.setdefault(weight.dtype, []).append(view)
        self._before = self._facts()

    def stamp(self) -> object:
        """Return the parts of passes, for comparison: modules, hooks, active adapters,
        and addresses, changes and some values of the weights."""
        modules = list(self._model.modules())
        adapters = [
            {name: repr(vars(module)[name]) for name in _ADAPTERS.intersection(vars(module))}
            for module in modules
        ]
        return self._contents(modules), changes_of(self._model), adapters

    def require(self) -> None:
        """Refuse a call of a changed model, and a call under `torch.autocast`."""
        require_no_autocast(self._device, self._name)
        now = self._facts()
        if now == self._before:
            return
        changed = next(key for key, value in now.items() if value != self._before[key])
        hint = "make the level anew"
        if changed == "training modes" and self._model.training:
            hint = "call model.eval()"
        elif changed in ("hooks", "modules", "weights"):
            hint += ", without pack where they are to change between calls"
        raise ValueError(
            f"{self._name}: expected the model as it was when its level was made, given one with "
            f"other {changed}; {hint}"
        )

    def _bound_weights(self) -> Iterator[Tensor]:
        return (weight for layer in self._bound for weight in layer.parameters(recurse=False))

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
        tables = [t for m in modules for t in (m._forward_pre_hooks, m._forward_hooks) if t]
        hooks = [
            number
            for table in tables
            for number, hook in table.items()
            if not str(getattr(hook, "__module__", "")).startswith(_PASSING)
        ]
        with torch.inference_mode():
            samples = [torch.cat([v.flatten() for v in x]) for x in self._sampled.values()]
        return {
            "hooks": hooks,
            "modules": [(dict(m._modules), m.__dict__.get("forward")) for m in modules],
            "weights": (
                [weight.data_ptr() for weight in self._bound_weights()],
                [values.cpu().view(torch.uint8).numpy().tobytes() for values in samples],
            ),
        }


# ---- hidden states -------------------------------------------------------------------------------


class HiddenStates:
    """Hidden states of a `transformers` model, read by hooks in the thread of a pass: at the inputs
    of its `count` decoder layers and after the final norm."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        body, self._layers = decoder_layers(model, int(config.num_hidden_layers))
        # Both end with the final norm: in some models the layers are nested deeper, in others the
        # base model is never called. If both are called, the outer module ends last.
        self._bodies = [
            module for module in dict.fromkeys((body, model.base_model)) if module is not model
        ]
        self.count = len(self._layers)

    def __bool__(self) -> bool:
        return self.count > 0

    def require(self, layers: Sequence[int], name: str) -> None:
        """Refuse layers that the model does not have."""
        if not self:
            raise ValueError(
                f"{name}: expected a model whose decoder layers are one list of modules, to give "
                "hidden states, given another"
            )
        if not all(-1 <= layer <= self.count for layer in layers):
            raise ValueError(
                f"{name}: hidden_layers: expected -1 to {self.count}, given {list(layers)}"
            )

    @contextmanager
    def taken(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Record the states of `layers` in passes of the model in this thread, in the returned
        dict: k in [0, L] the state after k decoder layers, -1 the state after the final norm."""
        states: dict[int, Tensor] = {}
        thread = threading.get_ident()

        def keeper(layer: int, read: Callable[..., Any]) -> Callable[..., None]:
            def hook(*arguments: Any) -> None:
                if threading.get_ident() == thread:  # other threads may run the model
                    states[layer] = read(*arguments[1:])

            return hook

        with ExitStack() as hooks:
            for layer in dict.fromkeys(layers):
                if layer == -1:
                    hook = keeper(layer, _behind)
                    handles = [body.register_forward_hook(hook) for body in self._bodies]
                elif layer == self.count:
                    last = self._layers[layer - 1]
                    handles = [last.register_forward_hook(keeper(layer, _behind))]
                else:
                    hook = keeper(layer, _entering)
                    entered = self._layers[layer]
                    handles = [entered.register_forward_pre_hook(hook, with_kwargs=True)]
                for handle in handles:
                    hooks.callback(handle.remove)
            yield states


def decoder_layers(model: nn.Module, count: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    """Return the module that has the decoder layers, and the layers: the first list of `count`
    modules (the configuration's number); without a matching list, the model and no layers."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, list(child)
    return model, ()


def _entering(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return arguments[0] if arguments else options["hidden_states"]


def _behind(arguments: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    last = getattr(output, "last_hidden_state", None)
    return output[0] if last is None else last


@contextmanager
def gathering(head: torch.nn.Module, rows: Tensor | None) -> Iterator[None]:
    """Pass only the hidden states of `rows` to `head` (see `gather`), because logits of all tokens
    would be large; None: all states. The model's processing of its logits still applies."""
    if rows is None:
        yield
        return
    pending: list[Tensor] = [rows]
    thread = threading.get_ident()

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        # Once, because a hook left by an interrupt must not change later passes; and in this
        # thread, because chains of other threads may run the same model.
        if not pending or threading.get_ident() != thread:
            return arguments
        return (gather(arguments[0], pending.pop()), *arguments[1:])

    handle = None
    try:
        handle = head.register_forward_pre_hook(hook, prepend=True)
        yield
    finally:
        pending.clear()
        if handle is not None:
            handle.remove()


# ---- passes with a cache -------------------------------------------------------------------------

# Maximum difference of a row of logits from its reference, as a fraction of its spread: the
# tolerance, or a few times the model's rounding difference when a batch has another row, which is
# large where a pass quantises activations. A wrong mask or position causes more.
_TOLERANCE, _TOLERANCE_HALF = 0.02, 0.1
_TIMES, _MOST = 4.0, 0.3
# Quantised layers may round activations to 8 bits, where a last-bit difference of a float moves a
# value by a whole step. Few passes show that, so embeddings are changed by this fraction, in so
# many rows: enough to move some values by a step, negligible in floats. So few rows do not show the
# maximum: a model of 1.5B parameters was refused for 1.3 times as much.
_NUDGE, _NUDGED, _MARGIN = 1e-4, 4, 2.0
# Logits so far below the largest do not matter, and logits of masked ids are not finite.
_REACH = 60.0

_SHORTEST = 14  # tokens; a model with a shorter context is not probed


class Step(NamedTuple):
    """A pass: row b appends ``counts[b]`` tokens, and is then truncated to ``kept[b]`` tokens."""

    counts: tuple[int, ...]
    kept: tuple[int, ...]


class Probe:
    """Comparison of a level's cached passes with a single pass of its model over the whole text.

    A model may accept every argument that a level passes and still take positions from cache slots,
    causality from the shape of its keys, or fail when several tokens follow cached tokens. So a new
    level is tried once with the calls of a chain: a prompt, passes of several tokens, rollbacks,
    rows of different lengths with some idle, and a tree. That is at most twelve passes over two
    rows of a few tokens, in a separate cache, and another pass of a model with quantised layers; on
    every rank of a sharded model alike.

    Not covered: behaviour that occurs only in longer texts, except as the configuration states it
    (`switch_of`).

    Args:
        level: a `HuggingFaceLevel`; its cache is replaced during the probe.
        new_cache: returns an empty cache for a number of rows and tokens, which keeps every token.
        longest: the model's context in tokens; None: no limit.

    Attributes:
        one_scale: whether quantised layers give a token other logits beside another row: after a
            comparison.
    """

    def __init__(
        self, level: Any, new_cache: Callable[[int, int], Any], longest: int | None
    ) -> None:
        self._level, self._new_cache = level, new_cache
        head = 17 if longest is None else min(17, longest - 4)
        self._head, self._informative = head, longest is None or longest >= _SHORTEST
        self._text = self._reference = torch.empty(0)
        self._tolerance, self._ids = 0.0, 1
        self.one_scale = False

    def single(self) -> str | None:
        """Return why a single prompt cannot be continued; None: it can."""
        return self._checked(lambda: self._worst((6,), [Step((5,), (9,)), Step((5,), (14,))]))

    def ragged(self) -> str | None:
        """Return why rows of different lengths cannot be continued together; None: they can."""
        n = self._head
        steps = Step((3, 5), (n + 2, 6)), Step((0, 6), (n + 2, 10)), Step((2, 2), (n + 4, 12))
        return self._checked(lambda: self._worst((n, 2), steps))

    def tree(self) -> str | None:
        """Return why a tree of tokens cannot be read; None: it can."""
        return self._checked(self._worst_of_tree)

    def prepared(self) -> str | None:
        """Return how inputs of the model's `prepare_inputs_for_generation` change the logits of a
        pass over ids alone; None: no change."""
        from transformers import GenerationMixin

        model, name = self._level.model, "prepare_inputs_for_generation"
        if getattr(type(model), name, None) in (None, getattr(GenerationMixin, name)):
            return None

        def differ() -> float:
            ids = self._text[None].to(self._level.device)
            inputs = model.prepare_inputs_for_generation(
                ids, attention_mask=torch.ones_like(ids), use_cache=False, is_first_iteration=True
            )
            logits = model(**{**inputs, "return_dict": True}).logits[0]
            return max(map(relative_difference, logits, self._reference))

        return self._checked(differ)

    @torch.inference_mode()
    def _checked(self, differ: Callable[[], float]) -> str | None:
        if not self._informative:
            return None

        def both() -> tuple[float, float]:
            if self._reference.numel() == 0:
                self._refer()
            return differ(), self._tolerance

        before = self._level.cache
        try:
            return failure(both)
        finally:
            self._level.adopt(before)

    def _worst(self, prompts: tuple[int, ...], steps: Sequence[Step]) -> float:
        """Return the maximum difference of rows of logits after kept tokens."""
        level = self._level
        rows, text = len(prompts), self._text.tolist()
        level.adopt(self._new_cache(rows, len(text)))
        even = len(set(prompts)) == 1
        level.append(self._padded([text[:n] for n in prompts]), None if even else prompts)
        have, worst = list(prompts), 0.0
        # Tokens to be rolled back are wrong, so that it shows if they stay.
        wrong = [(token + 1) % self._ids for token in text]
        keep = 2
        for counts, ends in steps:
            input_ids = [
                text[begin:end] + wrong[end : begin + count]
                for begin, count, end in zip(have, counts, ends, strict=True)
            ]
            new = [end - begin for begin, end in zip(have, ends, strict=True)]
            first = [max(n - keep, 0) for n in new]
            lengths = RowCounts([len(row) for row in input_ids])
            block = InputBlock(self._padded(input_ids), keep, lengths, RowCounts(first))
            logits = level.run(block).logits
            have, before = list(level.rollback(RowCounts(ends))), have
            for b, (start, n) in enumerate(zip(first, new, strict=True)):
                for j in range(start, n):
                    expected = self._reference[before[b] + j]
                    worst = max(worst, relative_difference(logits[b, j - start], expected))
        return worst

    def _worst_of_tree(self) -> float:
        """Return the maximum difference in two rows of different lengths, for a tree with the text
        among its paths, and for a pass after this path."""
        level, text, prompts = self._level, self._text.tolist(), (6, 3)
        level.adopt(self._new_cache(2, len(text)))
        level.append(self._padded([text[:n] for n in prompts]), prompts)
        path, worst = [1, 2, 4], 0.0
        parents = torch.tensor([[-1, -1, 1, 1, 2]] * 2).to(level.device)
        input_ids = []
        for n in prompts:
            nodes = [(token + 1) % self._ids for token in text[n : n + 5]]
            for depth, node in enumerate(path):
                nodes[node] = text[n + depth]
            input_ids.append(nodes)
        logits = level.run(InputBlock(self._padded(input_ids), 5, parents=parents)).logits
        for b, n in enumerate(prompts):
            for depth, node in enumerate(path):
                expected = self._reference[n + depth]
                worst = max(worst, relative_difference(logits[b, node], expected))
        have = [n + len(path) for n in prompts]
        level.keep_path(RowCounts(prompts), torch.tensor([path, path]), RowCounts(have))
        logits = level.run(InputBlock(self._padded([text[n : n + 1] for n in have]), 1)).logits
        for b, n in enumerate(have):
            worst = max(worst, relative_difference(logits[b, 0], self._reference[n]))
        return worst

    def _refer(self) -> None:
        """Choose a text, and compute the model's logits after each token and their tolerance."""
        level, length = self._level, max(self._head + 4, _SHORTEST)
        self._ids = ids_of(level.model, level.vocab_size)
        text = self._text = text_of(length, self._ids)
        ids = torch.stack([text, (text + 1) % self._ids]).to(level.device)
        whole, beside = (
            level.model(input_ids=rows, use_cache=False, return_dict=True).logits[0]
            for rows in (ids[:1], ids)
        )
        difference = max(map(relative_difference, beside, whole))
        rounding = _TIMES * difference
        if has_quantised_layers(level.model):
            self.one_scale = difference > tolerance(whole.dtype)
            hook = level.model.get_input_embeddings().register_forward_hook(_nudge)
            try:
                rows = ids[:1].expand(_NUDGED, -1)
                moved = level.model(input_ids=rows, use_cache=False, return_dict=True).logits
            finally:
                hook.remove()
            worst = (float(max(map(relative_difference, row, whole))) for row in moved)
            rounding = max(rounding, _MARGIN * max(worst))
        self._reference = whole
        self._tolerance = max(tolerance(whole.dtype), min(rounding, _MOST))

    def _padded(self, rows: Sequence[list[int]]) -> Tensor:
        return padded(rows, self._level.device)[0]


def _nudge(module: object, inputs: object, states: Tensor) -> Tensor:
    # Each row differently.
    size = max(_NUDGE, torch.finfo(states.dtype).eps)
    waves = torch.arange(states.numel(), device=states.device).sin().view_as(states)
    return (states * (1 + size * waves)).to(states.dtype)


def failure(differ: Callable[[], tuple[float, float]]) -> str | None:
    """Return why a model fails: `differ`, which returns a difference of logits and the allowed
    maximum, exceeds it or raises an exception; None: the model passes."""
    try:
        worst, most = differ()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # models may raise any exception
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return None if worst <= most else f"a relative difference of {worst:.2g}, above {most:.2g}"


def require_continued(found: str | None, model: Any, name: str) -> None:
    """Refuse a model that does not continue a cached text correctly; `found` is the result of
    `failure`."""
    if found is not None:
        raise ValueError(
            f"{name}: expected passes behind a cache that was rolled back to give the logits of "
            f"one pass over the whole text; {type(model).__name__} ({model.config.model_type}) "
            f"does not: {found}"
        )


def tolerance(dtype: torch.dtype) -> float:
    """Return the maximum difference of logits of a dtype that rounding explains."""
    return _TOLERANCE if dtype == torch.float32 else _TOLERANCE_HALF


def ids_of(model: Any, vocab_size: int) -> int:
    """Return the exclusive upper bound of ids that both embeddings and head of a model have."""
    return min(getattr(model.get_input_embeddings(), "num_embeddings", vocab_size), vocab_size)


def text_of(length: int, ids: int) -> Tensor:
    """Return a text of tokens below `ids`, ``[length]`` int64."""
    return torch.arange(1, length + 1) * 7919 % ids


def relative_difference(given: Tensor, wanted: Tensor) -> float:
    """Compare two rows of logits ``[V]``, up to a constant, relative to the spread of `wanted`.

    Returns 0 if `wanted` is not a distribution (NaN, +inf): the request then reports it.
    """

    def centred(row: Tensor) -> Tensor:
        row = row.double()
        row = (row - row.max()).clamp_min(-_REACH)
        return row - row.mean()

    wanted, given = centred(wanted), centred(given)
    if not bool(wanted.isfinite().all()):
        return 0.0
    distance = float((given - wanted).norm())
    # Centred rows of equal logits have only rounding errors, hence the lower bound.
    return float("inf") if distance != distance else distance / max(float(wanted.norm()), 1e-4)


# Rotary embeddings with the same frequencies for texts of any length.
_STATIC_ROPE = ("default", "linear", "llama3", "mrope", "proportional", "yarn")


def switch_of(config: Any) -> tuple[int, str] | None:
    """Return the maximum text length at which every pass of a model has the same rotary
    frequencies, and the reason; None: no limit.

    Beyond, a pass rotates its keys differently from the cached keys: `generate` of affected models
    drops the cache and reads the text again, or answers as no single pass would. Embeddings may
    differ by kind of layer.
    """
    limits: list[tuple[int, str]] = []
    for name in ("rope_parameters", "rope_scaling"):
        ropes = getattr(config, name, None) or {}
        several = [rope for rope in ropes.values() if isinstance(rope, Mapping)]
        for rope in several or [ropes]:
            kind = str(rope.get("rope_type", rope.get("type", "default")))
            if kind in _STATIC_ROPE:
                continue
            named = rope.get("original_max_position_embeddings")
            if named is None:
                named = getattr(config, "original_max_position_embeddings", None)
            if named is None or "dynamic" in kind:
                # A shorter pass resets frequencies that a longer pass has set.
                named = int(config.max_position_embeddings) - 1
            limits.append((int(named), f"{kind} embeddings change beyond them"))
    return min(limits, default=None)
