"""Quantization with the maximum of the amaxes of several processes."""

import torch
from torch import Tensor

from . import ops


def all_reduce_max(tensors: list[Tensor], group) -> None:
    """Replaces all the tensors by their maxima over the group (None: all processes), in one collective."""
    from torch.distributed import distributed_c10d  # not in every build of torch

    options = distributed_c10d.AllreduceCoalescedOptions()
    options.reduceOp = distributed_c10d.ReduceOp.MAX
    group = distributed_c10d._get_default_group() if group is None else group
    group.allreduce_coalesced(tensors, options).wait()


def _refuse(x: Tensor, amax) -> None:
    if amax is not None:
        raise ValueError(f"amax={amax!r}: not together with with_amax_reduction=True")
    if not ops.is_eager(x):
        raise NotImplementedError("with_amax_reduction=True is not supported for traced, fake or meta tensors")


def quantize(x, settings, amax=None, generator=None, rng_state=None) -> ops.Buffers:
    """As ops.quantize; every process of the group must call it, one whose x is empty too."""
    _refuse(x, amax)
    buffers = settings.native().empty(tuple(x.shape), x.device)
    quantize_into(x, buffers, settings, None, None, generator, rng_state)
    return buffers


def quantize_into(x, buffers: ops.Buffers, settings, noop_flag=None, amax=None, generator=None, rng_state=None) -> None:
    """As ops.quantize_into; every process of the group must call it, one whose noop flag is set too."""
    _refuse(x, amax)
    targets = buffers[4:]
    # A set noop flag forbids writing into the buffers, but the other processes wait for the amax of this one.
    reduced = targets if noop_flag is None else [None if t is None else torch.empty_like(t) for t in targets]
    ops.quantizer_amax_into(x, settings, *reduced)
    all_reduce_max([amax for amax in reduced if amax is not None], settings.amax_reduction_group)
    if noop_flag is not None:
        nothing = [None if t is None else torch.empty_like(t) for t in targets]
        settings.native().compute_amax_into(x[:0], *nothing, noop_flag)  # refuses a wrong flag before any write
        for target, new in zip(targets, reduced, strict=True):
            if target is not None:
                target.copy_(torch.where(noop_flag.reshape(1) == 1, target, new))
    ops.quantize_into(x, buffers, settings, noop_flag, None, generator, rng_state, with_amax=False)
