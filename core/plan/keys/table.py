"""Every key of a plan file, in one table."""

from __future__ import annotations

from .choices import choices_keys, data_parallel_keys, layout_keys
from .key import Key
from .machines import cluster_keys, runtime_keys
from .model import model_keys
from .training import checkpoint_keys, training_keys
from .variation import variation_keys

KEYS: tuple[Key, ...] = (
    *model_keys(),
    *cluster_keys(),
    *layout_keys(),
    *runtime_keys(),
    *choices_keys(),
    *training_keys(),
    *checkpoint_keys(),
    *data_parallel_keys(),
    *variation_keys(),
)
"""Every key of a plan file."""


def keys_of(section: str) -> dict[str, Key]:
    """The keys of one section by name."""
    return {key.name: key for key in KEYS if key.section == section}


def key_named(dotted: str) -> Key:
    """The key `section.name`. Raises KeyError."""
    section, _, name = dotted.partition(".")
    return keys_of(section)[name]
