"""What an operator does to those of its operands that are of one class, read from its schema."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_any, tree_map_only


def has_schema(func) -> bool:
    """False for the higher-order operators of torch.compile, which have none."""
    return isinstance(func, torch._ops.OpOverload)


def _aliased(func, cls: type, args: tuple, kwargs: dict) -> Iterator[Any]:
    """The alias infos of the arguments that hold a `cls`."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if tree_any(lambda leaf: isinstance(leaf, cls), value):
            yield argument.alias_info


@functools.cache
def is_view(func) -> bool:
    """Whether the operator returns a view of its first argument."""
    alias = func._schema.arguments[0].alias_info
    return alias is not None and not alias.is_write


def writes_into(func, cls: type, args: tuple, kwargs: dict) -> bool:
    """Whether the operator writes into a `cls` among its arguments."""
    return any(alias.is_write for alias in _aliased(func, cls, args, kwargs))


def views(func, cls: type, args: tuple, kwargs: dict) -> bool:
    """Whether the operator may return a view of a `cls` among its arguments."""
    return any(True for _ in _aliased(func, cls, args, kwargs))


def replace(cls: type, by, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with `by(x)` for every x that is a `cls`, at any depth."""
    return tree_map_only(cls, by, args), tree_map_only(cls, by, kwargs)
