"""The operator by which torch.compile sees a quantization as one step from a tensor to an NVFP4Tensor.

Dynamo cannot look into the making of a tensor subclass; it keeps an operator as it is. AOTAutograd then takes this one
apart into the native operator on plain buffers, since it is composite.
"""

import torch

from .settings import OPTIONS, Settings

_NATIVE_SCHEMA = str(torch.ops.nvfp4_quant.quantize.default._schema)
_library = torch.library.Library("nvfp4_quant", "FRAGMENT")
_library.define(
    _NATIVE_SCHEMA.removeprefix("nvfp4_quant::")
    .replace("quantize(Tensor x, *,", "quantize_tensor(Tensor x, *, ScalarType dtype, bool with_post_rht_amax,")
    .replace("-> Tensor[]", "-> Tensor")
)
quantize_tensor = torch.ops.nvfp4_quant.quantize_tensor


@torch.library.impl(_library, "quantize_tensor", "CompositeImplicitAutograd")
def _quantize_tensor(x, *, dtype, with_post_rht_amax, amax=None, amax_value=None, generator=None, **keywords):
    from .quantizer import quantize_differentiably

    options = {name: keywords[name] for name in OPTIONS if name in keywords}
    seed, offset = keywords.get("seed"), keywords.get("offset")
    rng_state = None if seed is None else (seed % 2**64, offset % 2**64)
    settings = Settings(**options, with_post_rht_amax=with_post_rht_amax)
    return quantize_differentiably(x, settings, dtype, amax if amax is not None else amax_value, generator, rng_state)
