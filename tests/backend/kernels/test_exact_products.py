"""What `ExactProducts` launches: with its tiles, over whole tensors of experts, and nothing where there is no row."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.backend.kernels.exact_products import TILES, ExactProducts, Tile, Tiles, merge_table
from shardproof.backend.kernels.kernel import Kernel

WHOLE = ((0, 2),)


class Launches:
    """A launcher that keeps what is launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[Kernel, int, dict[str, Any], dict[str, Any]]] = []

    def __call__(self, kernel: Kernel, num_blocks: int, arguments: Any, constants: Any, reached: Any = ()) -> None:
        self.launches.append((kernel, num_blocks, dict(arguments), dict(constants)))


def test_tiles_are_those_given() -> None:
    launched = Launches()
    tile = Tile(32, 16, 8, parts=4, num_warps=2)
    products = ExactProducts(launched, 4, {torch.float32: Tiles(Tile(64, 64, 8), tile)})
    products.contract(torch.ones(40, 32), torch.ones(32, 20), 8, ((0, 4),))
    products.project(torch.ones(40, 16), torch.ones(20, 16))
    (kernel, num_blocks, arguments, constants), (_, whole_blocks, _, whole) = launched.launches
    assert (whole_blocks, whole["TILE_M"]) == (1, 64)
    assert (kernel.num_warps, num_blocks) == (2, 4)
    assert [constants[name] for name in ("TILE_M", "TILE_N", "TILE_K", "PARTS")] == [32, 16, 8, 4]
    assert arguments["workspace"].numel() == 4 * 1 * 32 * 16  # programs, values held, a tile
    assert arguments["problems"].tolist()[-1] == 4


def test_tiles_of_a_launch_are_those_of_the_module() -> None:
    launched = Launches()
    ExactProducts(launched, 4).project(torch.ones(4, 4), torch.ones(4, 4))
    constants = launched.launches[0][3]
    assert tuple(constants[f"TILE_{dim}"] for dim in "MNK") == TILES[torch.float32].whole[:3]


def test_the_matrices_of_all_experts_are_given_to_the_kernel() -> None:
    launched = Launches()
    weight = torch.ones(5, 8, 12)[:, 1:7, 2:10]
    products = ExactProducts(launched, 4)
    products.project_experts(torch.ones(6, 8), weight, [(4, 0, 6)])
    products.contract_experts(torch.ones(6, 6), weight, [(4, 0, 6)], 3, WHOLE)
    for _, _, arguments, _ in launched.launches:
        assert arguments["right"].shape == weight.shape and arguments["right"].data_ptr() == weight.data_ptr()
        assert arguments["problems"].tolist()[1] == 4 * 8 * 12
    assert [(each[2]["right_column"], each[2]["right_k"]) for each in launched.launches] == [(12, 1), (1, 12)]


def test_nothing_is_launched_without_rows() -> None:
    launched = Launches()
    products = ExactProducts(launched, 4)
    assert products.project(torch.ones(0, 4), torch.ones(3, 4)).shape == (0, 3)
    assert products.project_experts(torch.ones(0, 4), torch.ones(2, 3, 4), [(0, 0, 0)]).shape == (0, 3)
    assert products.expert_weight_gradient(torch.ones(0, 4), torch.ones(0, 3), [], 1).shape == (0, 4, 3)
    assert launched.launches == []


def test_leaves_of_nodes_are_added_as_their_trees_say() -> None:
    assert merge_table([(0, 1), (1, 5), (5, 8)]) == [1, 0, 2, 0, 5, 0, 2, 3]
