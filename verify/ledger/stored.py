"""Values that a ledger kept: those of all tensors of a rank in one file, one after the other, as fp32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class StoredValues:
    """Where values of some shape lie: in `file` from `first_byte` on."""

    file: str
    first_byte: int
    shape: tuple[int, ...]

    def load(self) -> np.ndarray:
        """The values, fp32."""
        number = int(np.prod(self.shape))
        return np.fromfile(self.file, np.float32, number, offset=self.first_byte).reshape(self.shape)


def store_values(file: Path, values: np.ndarray) -> StoredValues:
    """Appends values to a file, which need not be there yet. Threads may append to one file at once."""
    written = np.ascontiguousarray(values, np.float32)
    with file.open("ab") as end:
        end.write(written.data)
        end.flush()
        return StoredValues(str(file), end.tell() - written.nbytes, values.shape)
