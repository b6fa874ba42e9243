"""A chain attached to a model of transformers: its `generate` runs the chain from then on."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from .transformers import custom_generate
from .transformers_checks import require_chain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..chain import Chain


class Attachment:
    """A chain that is attached to a model; as a context manager, until the end of the block.

    Attributes:
        model: whose `generate` runs the chain.
        chain: its target is the model.
    """

    def __init__(self, model: PreTrainedModel, chain: Chain) -> None:
        require_chain(chain, model)
        self.model: Any = getattr(model, "_orig_mod", model)
        self.chain = chain
        attached = _attached(self.model)
        if attached is None:
            self.model.generate = _generate_with([self], self.model)
        else:
            attached.append(self)

    def detach(self) -> None:
        """Detach the chain: `generate` is what it was before, or runs the chain that was attached
        before this one."""
        attached = _attached(self.model)
        if attached is not None and self in attached:
            attached.remove(self)
            if not attached:
                before = self.model.generate.before
                if before is None:
                    del self.model.generate
                else:
                    self.model.generate = before

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def attach(model: PreTrainedModel, chain: Chain) -> Attachment:
    """Have `model.generate` run `chain`, and with it pipelines and whatever else calls it:
    ``generate(..., custom_generate=custom_generate, chain=chain)`` without a change of the call. A
    `streamer`, `tokenizer` and `stop_strings` work as ever. Copies of the model are not attached.

    Args:
        model: the target of `chain`. The chain attached last counts.

    Returns:
        The attachment, whose `detach` or end as a context manager undoes it, as `detach` does.

    Raises:
        TypeError, ValueError: not a chain, or its target is another model.
    """
    return Attachment(model, chain)


def detach(model: PreTrainedModel) -> None:
    """Detach the chain that was attached last.

    Raises:
        ValueError: no chain is attached to `model`.
    """
    attached = _attached(getattr(model, "_orig_mod", model))
    if not attached:
        raise ValueError("model: expected one with an attached chain, given one without")
    attached[-1].detach()


class _NoStopStrings(GenerationConfig):  # type: ignore[misc]
    """A configuration that never has stop strings: for them `generate` asks for a tokenizer, which
    it keeps from a custom loop."""

    stop_strings = property(lambda _: None, lambda *_: None)


def _stop_strings_of(model: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the stop strings of the configuration of a call, and the arguments of `generate`
    without them."""
    config = options.get("generation_config")
    stops = getattr(config, "stop_strings", None) or model.generation_config.stop_strings
    if stops:
        options = dict(options)
        if config is None:  # `generate` warns of a configuration beside arguments
            config = GenerationConfig()
            options = config.update(**options)
        config = copy.deepcopy(config)
        vars(config).pop("stop_strings", None)
        config.__class__ = _NoStopStrings
        options["generation_config"] = config
    return stops, options


def _attached(model: Any) -> list[Attachment] | None:
    attached: list[Attachment] | None = getattr(vars(model).get("generate"), "attached", None)
    return attached


def _generate_with(attached: list[Attachment], owner: Any) -> types.MethodType:
    """Return a method `generate` of `owner` that runs the last of the attached chains."""
    plain = owner.generate
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def generate(self: Any, *args: Any, **options: Any) -> Any:
        if self is not owner:  # a copy of the model, which has copied its attributes
            return type(self).generate(self, *args, **options)
        if not attached or options.get("custom_generate") is not None:
            return plain(*args, **options)
        # transformers keeps its own streamer and tokenizer from a custom loop.
        own: dict[str, Any] = {"chain": attached[-1].chain, "tokenizer": options.get("tokenizer")}
        options = {**signature.bind_partial(*args).arguments, **options}
        if "stop_strings" not in options:
            own["stop_strings"], options = _stop_strings_of(self, options)
        if self.config.is_encoder_decoder:
            ids = options.get("input_ids", options.get("inputs"))
            options = {"encoder_input_ids": ids, **options}
        return plain(**{**options, "custom_generate": functools.partial(custom_generate, **own)})

    generate.attached, generate.before = attached, vars(owner).get("generate")  # type: ignore[attr-defined]
    return types.MethodType(generate, owner)
