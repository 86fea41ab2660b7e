"""The element types of Transformer Engine, of which this library quantizes to one."""

from enum import IntEnum


class DType(IntEnum):
    """Names and values of `transformer_engine_torch.DType`; only `kFloat4E2M1` is accepted as `fp4_dtype`."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10
