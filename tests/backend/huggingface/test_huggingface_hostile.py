"""Hugging Face folders that somebody else made: indexes and links stay inside, and headers that make no
sense name their file."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from shardproof.backend.huggingface.folder import INDEX, Folder
from shardproof.core.base.errors import PlanError


@pytest.fixture
def folder(tmp_path):
    """A folder with one tensor `x`, and another one, `outside`, next to it."""
    for name in ("model", "outside"):
        (tmp_path / name).mkdir()
        save_file({"x": torch.arange(6.0)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "file",
    [
        "../outside/model.safetensors",
        "{}/outside/model.safetensors",
        "a/x.safetensors",
        "..",
        "x.bin",
        "x.safetensors\0",
        5,
        None,
        ["x"],
    ],
    ids=repr,
)
def test_an_index_that_leaves_the_folder_is_refused(file, folder):
    file = file.replace("{}", str(folder.parent)) if isinstance(file, str) else file
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": file}}))
    with (
        Folder(folder) as opened,
        pytest.raises(PlanError, match=r"index\.json: .* is no name of a \.safetensors file of this folder"),
    ):
        opened.read("x", (slice(0, 6),))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "part.safetensors"])
def test_a_link_that_leads_out_is_refused(name, folder):
    if name == "part.safetensors":
        (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(
        folder.parent / "outside" / ("config.json" if name == "config.json" else "model.safetensors")
    )
    with Folder(folder) as opened, pytest.raises(PlanError, match=rf"{name}: this link leads out of the folder"):
        assert opened.config == {} and opened.shape("x")


def test_links_of_a_download_cache_are_followed_to_its_own_blobs(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("model.safetensors", "config.json")):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    with Folder(snapshot) as opened:
        assert opened.config == {} and opened.shape("x") == (6,)


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "part.safetensors"}}))
    with Folder(folder) as opened, pytest.raises(PlanError, match=r"part\.safetensors: this is no regular file"):
        opened.shape("x")


def entry(shape, first, last, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


HEADERS = {
    "a-header-of-an-exabyte": (1 << 60, b"{}"),
    "a-header-beyond-the-file": (1000, b"{}"),
    "deep": (None, b"[" * 100_000),
    "offsets-beyond-the-file": (None, {"x": entry([600], 0, 2400)}),
    "overlapping-offsets": (None, {"x": entry([4], 0, 16), "y": entry([4], 8, 24)}),
    "a-hole": (None, {"x": entry([2], 0, 8), "y": entry([2], 16, 24)}),
    "backwards": (None, {"x": entry([6], 24, 0)}),
    "a-size-that-overflows": (None, {"x": entry([1 << 62, 1 << 62], 0, 24)}),
    "negative": (None, {"x": entry([-6], 0, 24)}),
    "another-size": (None, {"x": entry([5], 0, 24)}),
    "an-unknown-format": (None, {"x": entry([6], 0, 24, "OBJECT")}),
    "no-object": (None, [1]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_makes_no_sense_is_refused_with_its_file(name, folder):
    length, header = HEADERS[name]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + bytes(24)
    )
    with (
        Folder(folder) as opened,
        pytest.raises(PlanError, match=r"model\.safetensors: this is no whole safetensors file"),
    ):
        opened.shape("x")


def test_a_folder_with_pickled_weights_alone_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with Folder(folder) as opened, pytest.raises(PlanError, match="holds neither"):
        opened.shape("x")


@pytest.mark.parametrize("sizes", [None, 3, [0, 0], [2], [2, "2"], [True, 2], [1 << 70, 2]])
def test_scales_of_tiles_that_make_no_sense_are_not_used(sizes, folder):
    (folder / "model.safetensors").unlink()
    tensors = {"x": torch.zeros(4, 4).to(torch.float8_e4m3fn), "x_scale_inv": torch.ones(2, 2)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": sizes}}))
    with Folder(folder) as opened:
        assert not opened.can_read("x")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [2, 2]}}))
    with Folder(folder) as opened:
        assert opened.can_read("x")
