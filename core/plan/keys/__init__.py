"""The keys of a plan file as a table: section, name, type, legal values, meaning, and the module
that reads the value."""

from .key import NOUNS, Key
from .table import KEYS, key_named, keys_of

__all__ = ["KEYS", "NOUNS", "Key", "key_named", "keys_of"]
