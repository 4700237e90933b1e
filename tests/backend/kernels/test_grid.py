"""Resident blocks against numbers from NVIDIA's occupancy calculator, done by hand here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardproof.backend.kernels.grid import DeviceLimits, Grid, KernelUse, agreed_grid, meeting_grid, resident_blocks

A100 = DeviceLimits(multiprocessors=108, registers=65536, warps=64, blocks=32, shared_bytes=167936)
H100 = DeviceLimits(multiprocessors=132, registers=65536, warps=64, blocks=32, shared_bytes=233472)


@pytest.mark.parametrize(
    ("use", "device", "expected"),
    [
        # 255 x 32 = 8160 registers a warp, in parts of 256: 8192; 8 warps; 2 blocks of 4
        (KernelUse(255, 0, 4), H100, Grid(2, "registers")),
        # 40 x 32 = 1280; 51 warps, in parts of 4: 48; 12 blocks of 4
        (KernelUse(40, 0, 4), H100, Grid(12, "registers")),
        # 33 x 32 = 1056, in parts of 256: 1280, as for 40
        (KernelUse(33, 0, 4), H100, Grid(12, "registers")),
        # 32 x 32 = 1024; 64 warps; both limits are 2 blocks of 32
        (KernelUse(32, 0, 32), H100, Grid(2, "registers")),
        # 16 x 32 = 512; 128 warps by registers, 64 by the multiprocessor; 16 blocks of 4
        (KernelUse(16, 0, 4), H100, Grid(16, "warps")),
        # one warp a block: 64 by warps, no more than 32 blocks
        (KernelUse(16, 0, 1), H100, Grid(32, "blocks")),
        # (65536 + 1024) x 3 = 199680 of 233472, x 2 = 133120 of 167936
        (KernelUse(16, 65536, 4), H100, Grid(3, "shared memory")),
        (KernelUse(16, 65536, 4), A100, Grid(2, "shared memory")),
        # the system's 1024 bytes are why not two of exactly half
        (KernelUse(16, 233472 // 2, 4), H100, Grid(1, "shared memory")),
    ],
)
def test_resident_blocks(use, device, expected):
    assert resident_blocks(use, device) == expected


def test_a_block_that_cannot_be_resident_is_refused():
    with pytest.raises(ValueError, match="registers do not suffice"):
        resident_blocks(KernelUse(255, 0, 12), H100)
    with pytest.raises(ValueError, match="no room for one block"):
        meeting_grid(KernelUse(32, 0, 4), H100, work_blocks=4, pad_blocks=0)


def test_a_grid_is_the_least_of_residency_work_and_pads():
    use = KernelUse(72, 0, 4)
    assert meeting_grid(use, H100, work_blocks=10**6, pad_blocks=10**6) == Grid(7 * 132, "registers")
    assert meeting_grid(use, H100, work_blocks=5, pad_blocks=10**6) == Grid(5, "work")
    assert meeting_grid(use, H100, work_blocks=0, pad_blocks=10**6) == Grid(1, "work")
    assert meeting_grid(use, H100, work_blocks=10**6, pad_blocks=128) == Grid(128, "signal pads")


def test_kernels_that_meet_on_one_device_share_what_is_resident():
    use = KernelUse(72, 0, 4)
    assert meeting_grid(use, H100, work_blocks=10**6, pad_blocks=10**6, sharing=3) == Grid(7 * 132 // 3, "registers")
    with pytest.raises(ValueError, match="not one for each of 1000 kernels"):
        meeting_grid(use, H100, work_blocks=1, pad_blocks=10**6, sharing=1000)


def test_peers_of_different_devices_launch_the_same_grid():
    grids = [Grid(132, "work"), Grid(108, "registers")]
    agreed = [agreed_grid(grid, lambda _: [grid.num_blocks for grid in grids]) for grid in grids]
    assert agreed == [Grid(108, "a peer"), Grid(108, "registers")]


def test_limits_of_a_device_come_from_its_properties():
    properties = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_multiprocessor=233472,
    )
    assert DeviceLimits.of(properties) == H100
