"""State dicts with quantized tensors in safetensors files, which hold plain tensors and a dict of strings.

A quantized tensor `name` becomes the tensors `name.nvfp4.rowwise_data`, `name.nvfp4.rowwise_scale_inv`, ..., as many as
it has; what else belongs to it is JSON under the metadata key `nvfp4_quant`. All other tensors are stored as they are.
"""

import json
import os
from typing import Any

import torch

from . import ops, serialization
from .storage import NVFP4TensorStorage
from .tensor import NVFP4Tensor

METADATA_KEY = "nvfp4_quant"
_MARK = ".nvfp4."


def _key(name: str, buffer: str) -> str:
    return f"{name}{_MARK}{buffer}"


def flatten(state_dict: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(plain tensors, description of the quantized ones by name). ValueError: a name that the format needs itself."""
    tensors, descriptions = {}, {}
    for name, value in state_dict.items():
        if not isinstance(value, NVFP4TensorStorage):
            if any(name.endswith(_key("", buffer)) for buffer in ops.BUFFERS):
                raise ValueError(f"state_dict key {name!r}: names that end like this are those of quantized tensors")
            tensors[name] = value
            continue
        present = {key: buffer for key, buffer in zip(ops.BUFFERS, value._buffers(), strict=True) if buffer is not None}
        tensors.update({_key(name, key): buffer for key, buffer in present.items()})
        descriptions[name] = {
            **serialization.to_plain(value),
            "buffers": list(present),
            "storage": not isinstance(value, NVFP4Tensor),
        }
    return tensors, descriptions


def unflatten(tensors: dict[str, torch.Tensor], descriptions: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`. KeyError: a missing tensor or description; ValueError: one that contradicts another."""
    rest = dict(tensors)
    quantized = {name: _take(rest, name, description) for name, description in descriptions.items()}
    for key in rest:
        if any(key.endswith(_key("", buffer)) for buffer in ops.BUFFERS):
            raise KeyError(f"{key}: the metadata {METADATA_KEY!r} does not describe this part of a quantized tensor")
        if key in quantized:
            raise ValueError(f"{key}: both a plain and a quantized tensor")
    return {**rest, **quantized}


def _take(tensors: dict[str, torch.Tensor], name: str, description: dict[str, Any]):
    """Builds one quantized tensor and removes its parts from `tensors`."""
    fields = {"format", "shape", "layout_shape", "stride", "dtype", "settings", "buffers", "storage"}
    missing = sorted(fields - description.keys()) + sorted(
        _key(name, buffer) for buffer in description.get("buffers", ()) if _key(name, buffer) not in tensors
    )
    if missing:
        raise KeyError(f"{name}: {missing} are missing")
    if unknown := set(description["buffers"]) - set(ops.BUFFERS):
        raise ValueError(f"{name}: buffers {sorted(unknown)} are unknown to this version")
    buffers = tuple(
        tensors.pop(_key(name, buffer)) if buffer in description["buffers"] else None for buffer in ops.BUFFERS
    )
    cls = NVFP4TensorStorage if description["storage"] else NVFP4Tensor
    try:
        return serialization.from_plain(cls, buffers, description)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: {error}") from error


def save_file(state_dict: dict[str, Any], path: str | os.PathLike, metadata: dict[str, str] | None = None) -> None:
    """Writes a state dict of plain and quantized tensors to a safetensors file, which any safetensors reader opens.

    metadata: further strings for the file's header. ValueError: a name or metadata key that the format needs itself.
    """
    from safetensors.torch import save_file as save_plain_file

    if metadata and METADATA_KEY in metadata:
        raise ValueError(f"metadata key {METADATA_KEY!r}: is written by nvfp4_quant")
    tensors, descriptions = flatten(state_dict)
    described = {METADATA_KEY: json.dumps(descriptions)} if descriptions else {}
    save_plain_file(tensors, path, metadata={**(metadata or {}), **described} or None)


def load_file(path: str | os.PathLike, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Reads a safetensors file, written by `save_file` or by anyone, onto `device`; names as in the saved state dict.

    KeyError: a missing part of a quantized tensor; ValueError: parts that contradict each other.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt", device=str(device)) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        text = (file.metadata() or {}).get(METADATA_KEY, "{}")
    try:
        descriptions = json.loads(text)
        well_formed = all(isinstance(description, dict) for description in descriptions.values())
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"metadata {METADATA_KEY!r} in {os.fspath(path)!r}: {error}") from error
    if not well_formed:
        raise ValueError(f"metadata {METADATA_KEY!r} in {os.fspath(path)!r}: must map names to objects")
    return unflatten(tensors, descriptions)
