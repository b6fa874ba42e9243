"""A chain attached to a model of transformers: its `generate` runs the chain from then on."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

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


def _attached(model: Any) -> list[Attachment] | None:
    attached: list[Attachment] | None = getattr(vars(model).get("generate"), "attached", None)
    return attached


def _generate_with(attached: list[Attachment], owner: Any) -> types.MethodType:
    """Return a method `generate` of `owner` that runs the last of the attached chains."""
    plain = owner.generate

    @functools.wraps(plain)
    def generate(self: Any, *args: Any, **options: Any) -> Any:
        if self is not owner:  # a copy of the model, which has copied its attributes
            return type(self).generate(self, *args, **options)
        if not attached or options.get("custom_generate") is not None:
            return plain(*args, **options)
        # transformers keeps its own streamer and tokenizer from a custom loop.
        own: dict[str, Any] = {"chain": attached[-1].chain, "tokenizer": options.get("tokenizer")}
        if self.config.is_encoder_decoder:
            ids = options.get("input_ids", options.get("inputs", args[0] if args else None))
            options = {"encoder_input_ids": ids, **options}
        return plain(
            *args, **{**options, "custom_generate": functools.partial(custom_generate, **own)}
        )

    generate.attached, generate.before = attached, vars(owner).get("generate")  # type: ignore[attr-defined]
    return types.MethodType(generate, owner)
