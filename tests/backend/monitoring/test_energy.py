"""Energy: counters as the kernel shows them, read once each however many ranks a host has."""

from __future__ import annotations

import pytest
import torch

from shardproof.backend.monitoring.energy import Energy, gpu_reader, processor_readers


@pytest.fixture
def powercap(tmp_path):
    """Two packages and a part of one, as `/sys/class/powercap` has them."""
    for name, microjoules in (("intel-rapl:0", 5_000_000), ("intel-rapl:1", 7_000_000), ("intel-rapl:0:0", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{microjoules}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")
    return tmp_path


def counted(powercap, package, microjoules):
    (powercap / package / "energy_uj").write_text(f"{microjoules}\n")


def test_packages_count_and_begin_again_at_their_range(powercap):
    readers, why = processor_readers(powercap)
    assert sorted(readers) == ["intel-rapl:0", "intel-rapl:1"] and why == ""
    counted(powercap, "intel-rapl:0", 9_500_000)
    assert readers["intel-rapl:0"]() == 4.5
    counted(powercap, "intel-rapl:0", 500_000)  # 0.5 J to the end of its range, and 0.5 J since
    assert readers["intel-rapl:0"]() == 5.5


def test_why_there_is_none(powercap, tmp_path):
    assert processor_readers(tmp_path / "none") == ({}, f"{tmp_path / 'none'} is not there")
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    found, why = processor_readers(powercap)
    assert found == {} and why.startswith(f"{powercap / 'intel-rapl:1' / 'energy_uj'} cannot be read (No such file")
    assert gpu_reader(torch.device("cpu")) == ({}, "ranks have no GPU")


def spent(transport, powercap):
    energy = Energy(transport, powercap)
    transport.everyone.barrier()
    if transport.global_rank == 0:
        for package, microjoules in (("intel-rapl:0", 6_000_000), ("intel-rapl:1", 9_000_000)):
            counted(powercap, package, microjoules)
    transport.everyone.barrier()
    return energy.reason, energy.spent(), energy.spent()


def test_two_ranks_of_a_host_count_its_packages_once(powercap, tmp_path, workers):
    assert workers(2, "memory").run(spent, powercap) == [("", 3.0, 0.0)] * 2
    reason = f"{tmp_path / 'none'} is not there; ranks have no GPU"
    assert workers(2, "memory").run(nothing_spent, tmp_path / "none") == [(reason, None)] * 2


def nothing_spent(transport, powercap):
    energy = Energy(transport, powercap)
    return energy.reason, energy.spent()
