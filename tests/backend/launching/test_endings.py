"""However a run ends, one line says so and nothing is left; and while it runs it listens on loopback alone."""

import contextlib
import os
import signal
import socket
from ipaddress import ip_address

import pytest

from helpers.processes import Started, listens, processes_of, wait_until
from shardproof.backend.checkpoint.resume import saved_in
from shardproof.backend.launching.torchrun import torchrun_transport
from shardproof.core.commands.cli import main

TRAIN = ["train", "--model", "tiny-llama", "--dtype", "fp32", "--sequence", "16", "--set", "train.steps=1000000"]
OTHER = next((name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))), "lo")
"""An interface that others can reach."""


@pytest.fixture
def start(tmp_path):
    """`start(*arguments, **environment)`: a program, of which nothing stays when the test is over."""
    started = []

    def start_one(*arguments: str, **environment: str) -> Started:
        started.append(Started(tmp_path, arguments, environment))
        return started[-1]

    yield start_one
    for run in started:
        for pid in (run.process.pid, *processes_of(run.mark)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


def reported(run: Started) -> str:
    """The line that the end has added to the header and the progress lines."""
    lines = run.errors.splitlines()
    assert "Traceback" not in run.errors and all(
        line.startswith(("metrics: ", "energy: ", "step ", "one device", "2 ranks")) for line in lines[:-1]
    ), run.errors
    return lines[-1]


def test_while_ranks_start_a_signal_to_the_parent_ends_all(start):
    run = start("shardproof", *TRAIN, "--tp", "2", "--transport", "memory")
    wait_until(lambda: len(processes_of(run.mark)) > 1, "the server of ranks")
    assert (run.end(signal.SIGTERM), reported(run), run.left()) == (143, "shardproof train: ended by SIGTERM.", [])


def test_a_local_run_listens_on_loopback_alone_whatever_interface_is_named_and_ends_with_its_terminal(start):
    """FSDP: torch makes groups of its own."""
    library = ["--zero", "3", "--set", "data_parallel.library=torch"]
    run = start("shardproof", *TRAIN, "--dp", "2", *library, GLOO_SOCKET_IFNAME=OTHER)
    run.wait_for("step 1/")
    assert listens(list(processes_of(run.mark))) == {"127.0.0.1"}
    assert (run.end(signal.SIGINT, group=True), reported(run), run.left()) == (
        130,
        ("shardproof train: ended by SIGINT."),
        [],
    )


def test_a_run_that_is_ended_while_it_saves_leaves_the_checkpoint_before_whole(start, capfd, monkeypatch):
    saves = [*TRAIN, "--dp", "2", "--set", "checkpoint.folder=saved"]
    run = start("shardproof", *saves, "--set", "checkpoint.every=1")
    run.wait_for("step 3/")  # the save after the second step has waited for that after the first
    folder = run.folder / "saved"
    wait_until(lambda: any(folder.glob("*.partial")), "a checkpoint under way")
    assert (run.end(signal.SIGINT), reported(run), run.left()) == (130, "shardproof train: ended by SIGINT.", [])
    steps = saved_in(folder)[-1].steps
    monkeypatch.chdir(run.folder)
    assert main([*saves, "--set", f"train.steps={steps + 1}", "--resume", "--json"]) == 0
    assert f"after {steps} steps" in capfd.readouterr().err and saved_in(folder)[-1].steps == steps + 1


def test_ranks_of_torchrun_on_one_host_listen_on_loopback_and_one_of_them_reports_the_end(start):
    run = start(
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "shardproof",
        *TRAIN,
        "--dp",
        "2",
        "--transport",
        "gloo",
    )
    run.wait_for("step 1/")
    found = processes_of(run.mark)
    ranks = [
        pid for pid, command in found.items() if "shardproof train" in command and "distributed.run" not in command
    ]
    assert len(ranks) == 2 and listens(ranks) == {"127.0.0.1"}
    run.end(signal.SIGTERM)
    assert run.left() == []
    own = run.errors.partition("Traceback")[0]  # torchrun's, of its own exception
    assert (
        own.count("ended by") == 1
        and "shardproof train: ended by SIGTERM." in own
        and "KeyboardInterrupt" not in run.errors
    )


def test_a_proof_that_is_killed_leaves_no_process_and_no_temporary_file(start):
    run = start("shardproof", "verify", "--model", "tiny-llama", "--dtype", "bf16", "--tp", "2", "--dynamic")
    wait_until(lambda: any(run.temporary.glob("shardproof-*/fast-*")), "values of a run in fast numerics")
    assert (run.end(signal.SIGKILL), run.left()) == (-9, [])


def listening_job(transport, payload):
    """The addresses that this rank listens on as one that torchrun has started, with gloo bound to an interface."""
    port, interface = payload
    os.environ |= {
        "RANK": str(transport.global_rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    retained, os.environ["GLOO_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"], interface
    try:
        with torchrun_transport(backend="gloo", timeout_s=30) as own:
            own.group("world", "dp", (0, 1)).barrier()
            return listens([os.getpid()])
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = retained


@pytest.mark.skipif(OTHER == "lo", reason="this machine has only loopback")
def test_over_several_hosts_gloo_listens_where_it_is_asked_to_and_the_store_of_rank_0_on_the_masters_address(workers):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for found in workers(2).run(listening_job, (port, OTHER)):
        others = {ip_address(address) for address in found} - {ip_address("127.0.0.1")}
        assert len(others) == 1 and not any(each.is_unspecified or each.is_loopback for each in others), found
