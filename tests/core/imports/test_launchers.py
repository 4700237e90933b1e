"""Scripts and manifests that start a plan: on its nodes, with every value quoted."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from shardproof.core.imports.launchers import nodes_of
from shardproof.core.imports.writers import write_as
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.write import toml_value
from shardproof.core.schedule.schedule import Schedule

HOSTILE = "x\"; touch /tmp/owned; $(id) `id` \\' #"


def plan(devices: int = 32, name: str = "mine", **more: Any) -> Plan:
    text = f"""
[model]
name = {toml_value(name)}
num_layers = 4
hidden_size = 64
ffn_hidden_size = 128
num_heads = 4
vocab_size = 256
[cluster]
preset = "dgx-h100"
num_devices = {devices}
[layout]
pp = 2
zero = 1
[batch]
global = 64
sequence = 128
"""
    return Plan.from_toml(text + "".join(f"[{section}]\n{line}\n" for section, line in more.items()))


def test_nodes_are_those_of_the_cluster():
    assert (nodes_of(plan()), nodes_of(plan(4))) == ((4, 8), (1, 4))


@pytest.mark.parametrize("name", ["torchrun", "slurm"])
def test_scripts_are_whole_shell_and_carry_the_plan(name: str):
    exported = write_as(plan(name=HOSTILE), name)
    (path, script), (plan_path, text) = exported.files
    assert subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True).returncode == 0, script
    assert "touch" not in [word for line in script.splitlines() if not line.startswith("#") for word in line.split()]
    assert ("--nnodes 4 --nproc-per-node 8" in script, plan_path, exported.lost) == (True, "plan.toml", ())
    assert Plan.from_toml(text).model.name == HOSTILE
    assert path.startswith("train.")


def test_torchrun_gets_the_words_that_are_meant(tmp_path):
    """The script is run with a torchrun of ours that prints its words."""
    script = write_as(plan(), "torchrun").files[0][1]
    (tmp_path / "train.sh").write_text(script)
    peer = tmp_path / "torchrun"
    peer.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    peer.chmod(0o755)
    run = subprocess.run(
        ["sh", str(tmp_path / "train.sh"), "--json"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "NODE_RANK": "3", "MASTER_ADDR": "a b"},
        capture_output=True,
        text=True,
    )
    nodes = "--nnodes|4|--nproc-per-node|8|--node-rank|3|--master-addr|a b|--master-port|29500"
    assert run.stdout == f"{nodes}|-m|shardproof|train|plan.toml|--json|"


def test_the_manifest_is_yaml_with_a_pod_a_node_and_the_plan_as_it_is():
    given = plan(name=HOSTILE)
    ((_, manifest),) = write_as(given, "kubernetes").files
    config, service, job = yaml.safe_load_all(manifest)
    assert Plan.from_toml(config["data"]["plan.toml"]) == given
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert (spec["completions"], spec["parallelism"], container["resources"]["limits"]["nvidia.com/gpu"]) == (4, 4, 8)
    name = service["metadata"]["name"]
    assert f"--master-addr {name}-0.{name} " in container["command"][2]
    assert name == spec["template"]["spec"]["subdomain"] == "x-touch-tmp-owned-id-id"


def test_the_csv_is_the_schedule_that_the_plan_runs():
    exported = write_as(plan(), "csv")
    schedule = Schedule.from_csv(exported.files[0][1])
    assert (schedule.placement.num_stages, exported.lost[0][0]) == (2, "schedule.name")
