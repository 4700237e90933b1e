"""Graphs as GraphML (http://graphml.graphdrawing.org), which graph editors and networkx read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx


def graphml(graph: networkx.DiGraph, name: Callable[[Any], str]) -> str:
    """The text of a file; `name` of a node is its id. Attributes are texts and numbers."""
    import networkx

    return "\n".join(networkx.generate_graphml(networkx.relabel_nodes(graph, name))) + "\n"
