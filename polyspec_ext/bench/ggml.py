"""llama.cpp's product with 4-bit weights (Q4_0), from a build of its library ggml."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

_F32, _Q4_0 = 0, 2  # ggml_type
_BLOCK, _BLOCK_BYTES = 32, 18  # inputs with one scale
_NODES = 16  # room in a context for tensors


class _InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


_PTR, _INT, _LONG, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
# What a function returns, and what it takes.
_BASE: dict[str, tuple[Any, Sequence[Any]]] = {
    "ggml_tensor_overhead": (_SIZE, ()),
    "ggml_graph_overhead": (_SIZE, ()),
    "ggml_init": (_PTR, (_InitParams,)),
    "ggml_new_tensor_2d": (_PTR, (_PTR, _INT, _LONG, _LONG)),
    "ggml_mul_mat": (_PTR, (_PTR, _PTR, _PTR)),
    "ggml_new_graph": (_PTR, (_PTR,)),
    "ggml_build_forward_expand": (None, (_PTR, _PTR)),
    "ggml_quantize_chunk": (_SIZE, (_INT, _PTR, _PTR, _LONG, _LONG, _LONG, _PTR)),
    "ggml_backend_alloc_ctx_tensors": (_PTR, (_PTR, _PTR)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_PTR, (_PTR, _PTR)),
    "ggml_backend_tensor_set": (None, (_PTR, _PTR, _SIZE, _SIZE)),
    "ggml_backend_tensor_get": (None, (_PTR, _PTR, _SIZE, _SIZE)),
    "ggml_backend_graph_compute": (_INT, (_PTR, _PTR)),
    "ggml_backend_reg_dev_get": (_PTR, (_PTR, _SIZE)),
    "ggml_backend_reg_get_proc_address": (_PTR, (_PTR, ctypes.c_char_p)),
}
_CPU: dict[str, tuple[Any, Sequence[Any]]] = {
    "ggml_backend_cpu_init": (_PTR, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_PTR, _INT)),
    "ggml_backend_cpu_reg": (_PTR, ()),
}
_ExtraKinds = ctypes.CFUNCTYPE(ctypes.POINTER(_PTR), _PTR)


def _load(folder: Path, name: str, functions: dict[str, tuple[Any, Sequence[Any]]]) -> Any:
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(f"--ggml: expected {name} in {folder}, found none")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    for function, (gives, takes) in functions.items():
        found = getattr(library, function)
        found.restype, found.argtypes = gives, takes
    return library


class Ggml:
    """The CPU backend of a build with shared libraries. What it allocates stands until the process
    ends.

    Args:
        folder: with libggml-base.so and libggml-cpu.so.
        threads: of its products.

    Raises:
        FileNotFoundError: a library is not there.
        ValueError: this build lays out no weights for the processor.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self._base = _load(folder, "libggml-base.so", _BASE)
        cpu = _load(folder, "libggml-cpu.so", _CPU)
        self._backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self._backend, threads)
        # llama.cpp's loader takes the first kind of buffer too: weights that are written to it are
        # laid out for this processor's instructions.
        registry = cpu.ggml_backend_cpu_reg()
        device = self._base.ggml_backend_reg_dev_get(registry, 0)
        name = b"ggml_backend_dev_get_extra_bufts"
        address = self._base.ggml_backend_reg_get_proc_address(registry, name)
        self._kind = _ExtraKinds(address)(device)[0] if address else None
        if self._kind is None:
            raise ValueError(
                f"--ggml: expected a build that lays out 4-bit weights for this processor "
                f"(GGML_CPU_REPACK), given one in {folder} that does not"
            )

    def _context(self) -> Any:
        size = _NODES * self._base.ggml_tensor_overhead() + self._base.ggml_graph_overhead()
        return self._base.ggml_init(_InitParams(size, None, True))

    def product(
        self, weight: torch.Tensor, tokens: Sequence[int]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """``x W^T``, ``[M, N]`` float32, for x ``[M, K]`` with M among `tokens`, by `weight`
        ``[N, K]`` rounded to Q4_0.

        Raises:
            ValueError: a shape without that layout.
        """
        base = self._base
        outputs, inputs = weight.shape
        if outputs % 8 or inputs % _BLOCK:
            raise ValueError(
                f"weight: expected multiples of 8 outputs and {_BLOCK} inputs, given "
                f"{outputs} x {inputs}"
            )
        rows = weight.float().contiguous()
        blocks = torch.empty(outputs * inputs // _BLOCK * _BLOCK_BYTES, dtype=torch.uint8)
        base.ggml_quantize_chunk(
            _Q4_0, rows.data_ptr(), blocks.data_ptr(), 0, outputs, inputs, None
        )
        own = self._context()
        matrix = base.ggml_new_tensor_2d(own, _Q4_0, inputs, outputs)
        base.ggml_backend_alloc_ctx_tensors_from_buft(own, self._kind)
        base.ggml_backend_tensor_set(matrix, blocks.data_ptr(), 0, blocks.numel())
        graphs = {}
        for count in tokens:
            context = self._context()
            x = base.ggml_new_tensor_2d(context, _F32, inputs, count)
            y = base.ggml_mul_mat(context, matrix, x)
            graph = base.ggml_new_graph(context)
            base.ggml_build_forward_expand(graph, y)
            base.ggml_backend_alloc_ctx_tensors(context, self._backend)
            graphs[count] = (x, y, graph)

        def run(given: torch.Tensor) -> torch.Tensor:
            x, y, graph = graphs[given.shape[0]]
            data = given.float().contiguous()
            base.ggml_backend_tensor_set(x, data.data_ptr(), 0, 4 * data.numel())
            base.ggml_backend_graph_compute(self._backend, graph)
            made = torch.empty(given.shape[0], outputs)
            base.ggml_backend_tensor_get(y, made.data_ptr(), 0, 4 * made.numel())
            return made

        return run
