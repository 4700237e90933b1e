"""`Folder`: the tensors of a Hugging Face folder, read block by block."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.base.errors import MissingExtraError, PlanError
from ...core.base.files import TABLE_BYTES, read_text
from ...core.base.parsing import parse_json

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
READ_DTYPES = ("F32", "BF16", "F16")
QUANTISED = "F8_E4M3"
"""Read where the tensor has scales, as DeepSeek publishes its third generation."""

_FILE_NAME = re.compile(r"[^/\\\x00-\x1f]+\.safetensors")
"""What an index may name: files of the folder itself."""

SCALES = "_scale_inv"
"""After the name of a quantised tensor, the name of the factors of its blocks."""


class Folder:
    """`config.json` and one `model.safetensors`, or several files with an index. Blocks are read as they are asked for.

    Raises `PlanError` when the folder has none of these files, `MissingExtraError` without the package `safetensors`.
    """

    def __init__(self, path: str | Path):
        if importlib.util.find_spec("safetensors") is None:
            raise MissingExtraError(
                "train.load needs safetensors, which is not installed. Run: pip install 'shardproof[train]'."
            )
        self.path = Path(path)
        self._open: dict[Path, Any] = {}
        self.num_bytes_read = 0

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The parsed `config.json`."""
        config = _json(self.path / "config.json")
        if not isinstance(config, dict):
            raise PlanError(
                f"{self.path / 'config.json'}: a config.json holds one object, this holds a {type(config).__name__}."
            )
        return config

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """Tensor name -> the file that holds it."""
        if (self.path / INDEX).is_file():
            index = _json(self.path / INDEX)
            if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
                raise PlanError(
                    f"{self.path / INDEX}: an index has a weight_map from tensors to files, and this has none."
                )
            return {name: self._named(file) for name, file in index["weight_map"].items()}
        file = self.path / ONE_FILE
        if not file.is_file():
            raise PlanError(
                f"train.load={str(self.path)!r} holds neither {ONE_FILE} nor {INDEX}. Give the folder of a Hugging "
                "Face model in "
                "safetensors format."
            )
        return dict.fromkeys(self._file(file).keys(), file)

    def _named(self, file: Any) -> Path:
        """The file of the folder that the index names so. Raises `PlanError` for a name that leads elsewhere."""
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise PlanError(
                f"{self.path / INDEX}: {str(file)[:80]!r} is no name of a .safetensors file of this folder. Write "
                "the folder again."
            )
        return self.path / file

    @property
    def absent(self) -> list[str]:
        """The tensors that the index names and the files do not have, each with the file that should."""
        held = {file: set(self._file(file).keys()) for file in dict.fromkeys(self.files.values())}
        return [f"{name} ({file.name})" for name, file in self.files.items() if name not in held[file]]

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The number format of a tensor, as the files write it: `F32`, `BF16`."""
        return str(self._slice(name).get_dtype())

    def can_read(self, name: str) -> bool:
        """Whether the tensor's number format is understood."""
        return self.dtype(name) in READ_DTYPES or (self.dtype(name) == QUANTISED and self._has_scales(name))

    def _has_scales(self, name: str) -> bool:
        """Whether a quantised tensor has a factor for each of its tiles."""
        quantisation = self.config.get("quantization_config")
        sizes = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None
        shape = self.shape(name)
        if f"{name}{SCALES}" not in self.files or not isinstance(sizes, list) or len(sizes) != len(shape):
            return False
        if not all(type(size) is int and size > 0 for size in sizes):
            return False
        return self.shape(f"{name}{SCALES}") == tuple(
            -(-whole // size) for whole, size in zip(shape, sizes, strict=True)
        )

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A block of a tensor, and no more than that from the disk. One of 8 bits becomes fp32 by
        the scales of its tiles."""
        block: Tensor = self._slice(name)[index]
        self.num_bytes_read += block.nbytes
        return block if self.dtype(name) != QUANTISED else self._scaled(block, f"{name}{SCALES}", index)

    def _scaled(self, block: Tensor, scales: str, index: tuple[slice, ...]) -> Tensor:
        """Every element times the factor of its tile (`weight_dequant` of DeepSeek-V3's inference/kernel.py)."""
        sizes = self.config["quantization_config"]["weight_block_size"]
        tiles = tuple(slice(part.start // size, -(-part.stop // size)) for part, size in zip(index, sizes, strict=True))
        factors: Tensor = self._slice(scales)[tiles]
        self.num_bytes_read += factors.nbytes
        for dim, (part, size) in enumerate(zip(index, sizes, strict=True)):
            first = part.start % size
            factors = factors.repeat_interleave(size, dim).narrow(dim, first, part.stop - part.start)
        return block.float() * factors

    def close(self) -> None:
        """Closes the files."""
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slice(self, name: str) -> Any:
        return self._file(self.files[name]).get_slice(name)

    def _file(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if path not in self._open:
            _check_own(path)
            try:
                self._open[path] = safe_open(path, framework="pt").__enter__()
            except FileNotFoundError as error:
                raise PlanError(f"{path}: there is no such file, though {INDEX} names it.") from error
            except (SafetensorError, OSError, ValueError, OverflowError) as error:
                raise PlanError(f"{path}: this is no whole safetensors file: {error}.") from error
        return self._open[path]


def _check_own(path: Path) -> None:
    """Raises `PlanError` for what is no regular file of the folder: a pipe, a folder, or a link that leads out of it.
    Links of a download cache lead to `blobs` next to `snapshots` (huggingface_hub, "Understand caching")."""
    try:
        real, folder = path.resolve(), path.parent.resolve()
        is_regular = real.is_file() or not real.exists()
    except (OSError, RuntimeError) as error:  # a circle of links
        raise PlanError(f"{path}: this link leads nowhere: {error}.") from error
    is_cached = folder.parent.name == "snapshots" and real.parent == folder.parent.parent / "blobs"
    if not is_regular:
        raise PlanError(f"{path}: this is no regular file. Write the folder again.")
    if real.parent != folder and not is_cached:
        raise PlanError(f"{path}: this link leads out of the folder, to {real}. Copy the file into the folder.")


def _json(path: Path) -> Any:
    _check_own(path)
    try:
        return parse_json(read_text(path, most_bytes=TABLE_BYTES), str(path))
    except FileNotFoundError as error:
        raise PlanError(f"{path}: there is no such file, but every Hugging Face model has it.") from error
