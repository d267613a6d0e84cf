"""The one decorator for values that cross `jit`: a frozen dataclass that is a pytree."""

import dataclasses
import typing

import jax

T = typing.TypeVar("T")


def static(**kwargs) -> typing.Any:
    """A field that is part of the tree's structure: hashable, compared by value, never traced."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def pytree(cls: type[T]) -> type[T]:
    """Freeze `cls` and register it; fields made by `static()` become metadata, all others leaves.

    `no_type_check` keeps jaxtyping's import hook from refusing to rebuild the value out of
    non-arrays, which `jax.tree.map`, `eval_shape` and sharding trees all do.
    """
    cls = typing.no_type_check(dataclasses.dataclass(frozen=True)(cls))
    names: dict[bool, list[str]] = {False: [], True: []}
    for field in dataclasses.fields(typing.cast(typing.Any, cls)):
        names[bool(field.metadata.get("static"))].append(field.name)
    return jax.tree_util.register_dataclass(cls, names[False], names[True])
