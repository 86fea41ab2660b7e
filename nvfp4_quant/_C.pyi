"""The native module. Six buffers are in flatten order: row-wise data, scales; column-wise data, scales; both amaxes."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Generator, Tensor

Buffers = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]

BLOCK_SIZE: int  # elements that share a scale
numerics: ModuleType  # the numeric rules on CPU tensors, for tests

class NVFP4Quantizer:
    """Options of a quantization, checked together: ValueError where they exclude each other. Immutable, hashable."""

    def __init__(
        self,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_rht: bool = False,
        with_random_sign_mask: bool = True,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        optimize_for_gemm: bool = False,
        schedule: str = "auto",
    ) -> None: ...
    @property
    def rowwise(self) -> bool: ...
    @property
    def columnwise(self) -> bool: ...
    @property
    def with_rht(self) -> bool: ...
    @property
    def with_random_sign_mask(self) -> bool: ...
    @property
    def with_2d_quantization(self) -> bool: ...
    @property
    def stochastic_rounding(self) -> bool: ...
    @property
    def row_scaled_nvfp4(self) -> bool: ...
    @property
    def nvfp4_use_4over6(self) -> bool: ...
    @property
    def nvfp4_e4m3_max(self) -> int: ...
    @property
    def nvfp4_4over6_err_mode(self) -> str: ...
    @property
    def optimize_for_gemm(self) -> bool: ...
    @property
    def schedule(self) -> str: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def quantize(
        self,
        x: Tensor,
        amax: Tensor | float | None = None,
        generator: Generator | None = None,
        rng_state: tuple[int, int] | None = None,
    ) -> Buffers: ...
    def quantize_into(
        self,
        x: Tensor,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        amax_rowwise: Tensor | None,
        amax_columnwise: Tensor | None,
        noop_flag: Tensor | None = None,
        amax: Tensor | float | None = None,
        generator: Generator | None = None,
        rng_state: tuple[int, int] | None = None,
        with_amax: bool = True,
    ) -> None: ...
    def compute_amax_into(
        self, x: Tensor, amax_rowwise: Tensor | None, amax_columnwise: Tensor | None, noop_flag: Tensor | None = None
    ) -> None: ...
    def empty(self, shape: Sequence[int], device: torch.device, pin_memory: bool = False) -> Buffers: ...
    def buffer_shapes(self, shape: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]: ...

def compute_amax(
    x: Tensor, amax_rowwise: Tensor, amax_columnwise: Tensor | None = None, noop_flag: Tensor | None = None
) -> None: ...
def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    columnwise: bool,
    swizzled: bool,
    with_rht: bool,
    with_random_sign_mask: bool,
    nvfp4_e4m3_max: int,
) -> Tensor: ...
def swizzle_scales(
    rowwise_scale_inv: Tensor | None, columnwise_scale_inv: Tensor | None, inverse: bool = False
) -> tuple[Tensor | None, Tensor | None]: ...
def scale_shape(shape: Sequence[int], columnwise: bool) -> tuple[int, int]: ...
def columnwise_shape(shape: Sequence[int]) -> tuple[int, int]: ...
def build_info() -> dict[str, Any]: ...
