"""Trees: nested dicts and lists whose leaves are anything else.

A parameter tree is written by a model as nested dicts; the engine works on the flat form, an ordered dict from a
dotted name ("blocks.0.attention.wq") to a leaf, because checkpoints, optimizers and reports all key by name.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Tree = Any


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, leaf) in the tree's own order."""
    if isinstance(tree, Mapping):
        children = tree.items()
    elif isinstance(tree, list):
        children = enumerate(tree)
    else:
        yield prefix, tree
        return
    for key, child in children:
        yield from leaves(child, f"{prefix}.{key}" if prefix else str(key))


def flatten(tree: Tree) -> dict[str, Any]:
    """Return {dotted name: leaf} in the tree's own order."""
    return dict(leaves(tree))


def map_named(function: Callable[[str, Any], Any], tree: Tree, prefix: str = "") -> Tree:
    """Return a tree of the same form with each leaf replaced by ``function(name, leaf)``."""
    if isinstance(tree, Mapping):
        return {
            key: map_named(function, child, f"{prefix}.{key}" if prefix else str(key)) for key, child in tree.items()
        }
    if isinstance(tree, list):
        return [map_named(function, child, f"{prefix}.{i}" if prefix else str(i)) for i, child in enumerate(tree)]
    return function(prefix, tree)
