"""`exact_product` as it should not be, and which floor finds it: other leaves, another tree, another place."""

from __future__ import annotations

from collections.abc import Mapping

from .compilation_mutants import CompilationMutant


def _of_product(name: str, finds: Mapping[str, str], before: str, after: str) -> CompilationMutant:
    return CompilationMutant(name, "exact_product", finds, file="products", before=before, after=after)


_BITS = {"PTX executed": "bits are wrong"}
_BEYOND = {"PTX executed": "are no memory of the launch"}
_LEAF = """begin = number * leaf
            end = tl.minimum(begin + leaf, k)"""

PRODUCT_MUTANTS = (
    _of_product(
        "leaves added in sequence",
        _BITS,
        "todo = tl.load(merges + number)",
        "todo = tl.load(merges + number) % 2 + 2 * tl.minimum(depth, 1)",
    ),
    _of_product(
        "values held added from the first one on",
        _BITS,
        "at = held + (depth + count - 2 - below) * (TILE_M * TILE_N)",
        "at = held + (depth + below) * (TILE_M * TILE_N)",
    ),
    _of_product(
        "leaves begin one later",
        _BITS,
        _LEAF,
        """begin = number * leaf + tl.minimum(number, 1)
            end = tl.minimum((number + 1) * leaf + 1, k)""",
    ),
    _of_product(
        "the last leaf ends where another would",
        _BEYOND,
        _LEAF,
        _LEAF.replace("tl.minimum(begin + leaf, k)", "begin + leaf"),
    ),
    _of_product("the last k are not masked", _BEYOND, "is_k = lane_k < end - first_k", "is_k = lane_k < TILE_K"),
    _of_product(
        "two values in one place of the workspace",
        _BITS,
        "laid_by(top, held + (depth - 1) * (TILE_M * TILE_N)",
        "laid_by(top, held + tl.minimum(depth - 1, 0) * (TILE_M * TILE_N)",
    ),
    _of_product(
        "a stride that is not specialised",
        {"assembled": "operands are read 2 bytes at a time"},
        "    left_k,\n",
        "    left_k: tl.int64,\n",
    ),
)
"""Its two barriers are none of them: the code that is compiled today has others in their places, of products and of
changes of layout."""
