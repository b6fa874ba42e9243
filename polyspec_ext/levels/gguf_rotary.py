"""What GGUF files say of rotations, beyond what `transformers` reads of them.

Files of Llama 3.1 and later have a factor of each frequency as a tensor. Other scalings stand in
the header; a model that left them out would be another one, so they are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from .gguf_file import GgufFile

FACTORS = "rope_freqs.weight"


def scale_rotations(model: Any, file: GgufFile) -> None:
    """Has the rotations of a model that was made of `file` follow it.

    Args:
        model: of transformers, with tables of frequencies for its base and width alone.

    Raises:
        ValueError: the header asks for a scaling that is not known here, or has factors of another
            number than the model has frequencies; names what was expected and what came.
    """
    family = file.metadata.get("general.architecture")
    key = f"{family}.rope.scaling.type"
    kind = file.metadata.get(key, "none")
    if kind != "none":
        raise ValueError(f"expected a file without {key}, given {kind}")
    tensor = file.tensors.get(FACTORS)
    if tensor is None:
        return
    factors = tensor.dequantised()
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(module, name, None)
            if not isinstance(frequencies, torch.Tensor):
                continue
            if frequencies.shape != factors.shape:
                raise ValueError(
                    f"{FACTORS}: expected shape {list(frequencies.shape)}, as the model has "
                    f"frequencies, given {list(factors.shape)}"
                )
            setattr(module, name, frequencies / factors.to(frequencies))
