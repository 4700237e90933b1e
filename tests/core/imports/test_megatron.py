"""Megatron's arguments as plans: what each script of ours comes to, and that plans survive the way there and back."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.gates import sampled
from shardproof.core.base.errors import PlanError, UnknownNameError
from shardproof.core.commands.cli import main
from shardproof.core.imports.account import STATUSES, Request
from shardproof.core.imports.given import import_file, values_of
from shardproof.core.imports.megatron_experts import layer_pattern
from shardproof.core.imports.megatron_flags import RELEASES, UNDER, all_flags
from shardproof.core.imports.megatron_write import write
from shardproof.core.layout.stages import layers_written
from shardproof.core.model.rotary import rotary_growth
from shardproof.core.plan.keys import KEYS
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.plan import Plan, any_plan, build_plan
from shardproof.core.plan.sections import Batch
from shardproof.core.plan.toml import Given

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"

PLANS = {
    "arrays.sh": {
        "cluster.num_devices": 16,
        "layout.vpp": 4,
        "layout.zero": 1,
        "layout.sequence_parallel": True,
        "model.num_kv_heads": 8,
        "model.vocab_size": 128512,
        "model.bias": False,
        "model.tied_embeddings": False,
        "schedule.name": "Interleaved1F1B",
        "data_parallel.overlap_grad_reduce": True,
        "data_parallel.overlap_param_gather": False,
        "precision.dtype": "bf16",
    },
    "text_variables.sh": {
        "layout.tp": 2,
        "layout.pp": 2,
        "batch.global_size": 32,
        "precision.dtype": "fp16",
        "precision.initial_loss_scale": 2.0**32,
        "model.attention_dropout": 0.1,
        "model.activation": "gelu_tanh",
        "model.ffn_hidden_size": 3072,
        "model.tied_embeddings": True,
        "model.position": "learned",
        "optimizer.betas": (0.9, 0.999),
        "optimizer.weight_decay": 0.01,
    },
    "harmless_branch.sh": {"batch.global_size": 8},
    "case_function.sh": {"model.num_layers": 32, "model.hidden_size": 4096, "cluster.num_devices": 8},
    "slurm.sh": {"cluster.num_devices": 32, "layout.dp": 2},
    "nested_quotes.slurm": {"cluster.num_devices": 16, "model.num_layers": 24},
    "experts.sh": {
        "layout.ep": 8,
        "layout.etp": 1,
        "model.num_experts": 64,
        "model.first_dense_layers": 1,
        "model.num_shared_experts": 2,
        "model.normalized_router_weights": False,
        "model.kv_lora_rank": 512,
        "model.rope_scaling": "yarn",
        "train.router_aux_loss": 1e-3,
    },
    "uneven.sh": {"layout.stages": "Et*7|t*8|t*8|t*7L"},
    "counted_embedding.sh": {"layout.stages": "Et*3|t*4|t*4|t*3L"},
    "layout_string.sh": {"layout.vpp": 2, "schedule.name": "Interleaved1F1B"},
    "recompute.sh": {"recompute.mode": "full", "recompute.num_layers": 4, "recompute.distribute": True},
    "old_release.sh": {
        "layout.tp": 2,
        "batch.micro_size": 8,
        "batch.global_size": 32,
        "runtime.profile": "megatron-2021",
        "recompute.mode": "full",
    },
    "deepspeed.sh": {"cluster.num_devices": 16, "layout.zero": 1, "runtime.profile": "megatron-deepspeed-2023"},
}
"""Script -> some keys of the plan that it describes."""

REFUSED = {
    "plain.args": (0, "Give --devices N"),
    "model_config.yaml": (0, "Give --devices N"),
    "unknown_value.sh": (5, "--variable 1=VALUE"),
    "undecided_branch.sh": (4, "--variable WIDE=VALUE"),
    "cut_off.sh": (2, "a backslash with a blank behind it"),
    "mistyped.sh": (2, "did you mean '--tensor-model-parallel-size'?"),
    "state_space.sh": (3, "state-space"),
}
"""Script -> the line that is refused, and words of the reason."""


def devices(number: int) -> dict[str, dict[str, Given]]:
    """What --devices gives."""
    return {"cluster": {"num_devices": Given(number, "--devices")}}


def imported(text: str, name: str = "pretrain.sh", **given):
    found = import_file(Request(text, name, **given))
    assert found is not None
    return found


def value(plan: Plan, key: str):
    section, _, name = key.partition(".")
    return getattr(getattr(plan, section), name)


@pytest.mark.parametrize("name", PLANS)
def test_a_script_is_this_plan(name):
    values, account = values_of(str(SCRIPTS / name))
    plan = any_plan(values, name)
    assert {key: value(plan, key) for key in PLANS[name]} == PLANS[name]
    assert account is not None
    assert {each.status for each in account.settings} <= {*STATUSES}


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_is_refused_with_its_line_and_what_helps(name):
    line, words = REFUSED[name]
    with pytest.raises(PlanError) as refused:
        values_of(str(SCRIPTS / name))
    said = str(refused.value)
    assert words in said
    assert f"{name}:{line}: " in said or not line


def test_every_script_is_here_and_every_argument_of_it_accounted_for():
    assert {path.name for path in SCRIPTS.iterdir()} == {*PLANS, *REFUSED, "two_commands.sh"}
    text = (SCRIPTS / "arrays.sh").read_text()
    written = {word.strip("()") for line in text.split("\n") for word in line.split("#")[0].split() if "--" in word}
    assert {each.flag for each in imported(text).settings if each.line} == {
        word.removeprefix("LAUNCH=(").removeprefix("LAYOUT=(").removeprefix("TRAIN=(").removeprefix("TRAIN+=(")
        for word in written
    } - {"--fp16"}


def test_devices_make_a_plan_of_arguments_alone():
    values, _ = values_of(str(SCRIPTS / "plain.args"), options=devices(16))
    assert any_plan(values, "plain.args").layout.dp == 16


def test_a_yaml_file_needs_devices_alone():
    pytest.importorskip("yaml")
    values, _ = values_of(str(SCRIPTS / "model_config.yaml"), options=devices(8))
    plan = any_plan(values, "model_config.yaml")
    assert (plan.layout.tp, plan.layout.dp, plan.precision.dtype) == (2, 4, "bf16")
    assert (plan.recompute.mode, plan.recompute.modules) == ("selective", ("norm", "mlp"))


def test_a_variable_that_the_script_does_not_have_is_refused():
    path = str(SCRIPTS / "unknown_value.sh")
    with pytest.raises(PlanError, match="--variable TPP: "):
        values_of(path, variables={"1": "4", "TPP": "8"})
    with pytest.raises(PlanError, match="--variable 2: "):
        values_of(path, variables={"1": "4", "2": "8"})


def test_a_release_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(UnknownNameError, match=r"unknown release of Megatron '99'.*0\.8"):
        values_of(str(SCRIPTS / "unknown_value.sh"), named="megatron:99", variables={"1": "4"})


def test_variables_settle_what_is_not_known():
    values, _ = values_of(str(SCRIPTS / "unknown_value.sh"), variables={"1": "4"})
    assert any_plan(values, "").layout.tp == 4
    values, _ = values_of(str(SCRIPTS / "undecided_branch.sh"), variables={"WIDE": "1"})
    assert any_plan(values, "").layout.cp == 2


def test_one_of_several_commands_is_asked_for_and_taken():
    path = str(SCRIPTS / "two_commands.sh")
    with pytest.raises(PlanError, match="on lines 4, 6"):
        values_of(path)
    values, _ = values_of(path, variables={"TRAINING_LINE": "6"})
    assert any_plan(values, "").layout.tp == 4


RATES = (
    "torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 512 --micro-batch-size 1 --vocab-size 1024 --max-position-embeddings 512 --bf16 --lr 1e-3 "
)


@pytest.mark.parametrize(
    ("arguments", "optimizer", "batch", "steps"),
    [
        (
            "--global-batch-size 8 --train-iters 100 --min-lr 1e-5 --lr-warmup-iters 10",
            {"schedule": "linear", "warmup_steps": 10, "minimum_learning_rate": 1e-5},
            {},
            100,
        ),
        ("--global-batch-size 8 --train-iters 100 --lr-decay-style constant --min-lr 1e-5", {}, {}, 100),
        (
            "--global-batch-size 8 --train-iters 100 --lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-decay-iters 90 "
            "--lr-warmup-fraction 0.1 --lr-warmup-init 1e-6",
            {
                "schedule": "wsd",
                "wsd_decay_steps": 20,
                "decay_steps": 90,
                "warmup_fraction": 0.1,
                "initial_learning_rate": 1e-6,
            },
            {},
            100,
        ),
        (
            "--global-batch-size 8 --rampup-batch-size 4 4 40 --train-samples 104 --lr-decay-style cosine "
            "--lr-warmup-samples 20",
            {"schedule": "cosine", "warmup_steps": 20, "counted_in": "samples"},
            {"rampup": (4, 4, 40)},
            18,
        ),
        (
            "--global-batch-size 8 --train-samples 99 --lr-decay-style inverse-square-root --lr-warmup-samples 9",
            {"schedule": "inverse_sqrt", "warmup_steps": 9, "decay_steps": 99, "counted_in": "samples"},
            {},
            12,
        ),
        (
            "--step-batch-size-schedule '0:4 1M:16' --train-iters 100 --lr-decay-style constant",
            {},
            {"schedule": "0:4 1M:16", "schedule_unit": "tokens", "global_size": 16},
            100,
        ),
        (
            "--global-batch-size 8 --train-iters 100 --lr-decay-style constant --weight-decay-incr-style cosine "
            "--start-weight-decay 0.05 --end-weight-decay 0.2",
            {"weight_decay_schedule": "cosine", "weight_decay": 0.05, "end_weight_decay": 0.2},
            {},
            100,
        ),
        (
            "--global-batch-size 10 --decrease-batch-size-if-needed --train-iters 9 --lr-decay-style constant",
            {},
            {"global_size": 8},
            9,
        ),
    ],
)
def test_rates_and_batches_are_those_of_megatron(arguments, optimizer, batch, steps):
    found = imported(RATES + arguments)
    plan = any_plan(found.values, "")
    assert not [each for each in found.settings if each.status not in ("mapped", "no-effect")]
    usual = dataclasses.replace(Optimizer(), weight_decay=0.01, betas=(0.9, 0.999))
    assert plan.optimizer == dataclasses.replace(usual, **optimizer)
    assert plan.batch == dataclasses.replace(Batch(8, 1, 512), **batch) and plan.train.steps == steps


@pytest.mark.parametrize(
    ("arguments", "flag", "words"),
    [
        (
            "--step-batch-size-schedule 0:4 --decrease-batch-size-if-needed --train-iters 9",
            "--step-batch-size-schedule",
            "takes no list with",
        ),
        ("--step-batch-size-schedule 4 --train-iters 9", "--step-batch-size-schedule", "no pair of a threshold"),
        ("--lr-decay-style step --train-iters 9", "--lr-decay-style", "known are constant, linear"),
        ("--lr-decay-style WSD --train-iters 9", "--lr-decay-style", "WSD needs --lr-wsd-decay-iters"),
        (
            "--weight-decay-incr-style linear --train-iters 9",
            "--weight-decay-incr-style",
            "needs --start-weight-decay and --end-weight-decay",
        ),
    ],
)
def test_rates_and_batches_that_megatron_refuses_are_refused(arguments, flag, words):
    found = imported(f"{RATES} --global-batch-size 8 {arguments}")
    (refused,) = found.of_status("refused")
    assert refused.flag == flag and words in refused.why


def test_a_schedule_of_which_something_is_not_known_leaves_the_rate_as_it_is():
    found = imported(f"{RATES} --global-batch-size 8 --train-iters 9 --min-lr $LEAST --lr-decay-style cosine")
    plan = any_plan(found.values, "")
    assert plan.optimizer.schedule == "constant" and not list(found.of_status("refused"))
    whys = {each.flag: each.why for each in found.of_status("not-modelled")}
    assert set(whys) == {"--min-lr", "--lr-decay-style"} and "--min-lr is not known here" in whys["--lr-decay-style"]


STAGES = "--pipeline-model-parallel-size"
SHARED = "--num-experts 4 --moe-shared-expert-intermediate-size 96 --moe-ffn-hidden-size 64"
BASE = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 1 --bf16 "


@pytest.mark.parametrize(
    ("arguments", "status", "key", "words"),
    [
        ("--swiglu", "mapped", "model.activation", ""),
        ("--sequence-parallel", "no-effect", None, "tensor parallelism is 1"),
        ("--num-query-groups 2", "no-effect", None, "nothing else that is given makes it count"),
        ("--lr-decay-style cosine", "not-modelled", None, "learning rate"),
        ("--rotary-percent 1.0 --position-embedding-type rope", "no-effect", None, "default"),
        ("--rotary-percent 0.5", "no-effect", None, "makes it count"),
        ("--rotary-percent 0.5 --position-embedding-type rope", "mapped", "model.rope_dim", ""),
        ("--no-rope-freq 4 --position-embedding-type rope", "mapped", "model.rope_layers", ""),
        ("--no-rope-freq [1,0] --position-embedding-type rope", "refused", "model.rope_layers", "one for each layer"),
        ("--window-attn-skip-freq 2", "no-effect", None, "makes it count"),
        ("--window-attn-skip-freq 2 --window-size 127,0", "mapped", "model.window_layers", ""),
        ("--softmax-type vanilla", "no-effect", None, "default"),
        ("--softmax-type off-by-one", "refused", "model.attention_sinks", "learnable"),
        ("--save $WHERE", "no-effect", None, "checkpoints"),
        ("--position-embedding-type alibi", "mapped", "model.position", ""),
        ("--position-embedding-type relative", "refused", "model.position", "learned positions, rotary ones and ALiBi"),
        ("--embed-layernorm --position-embedding-type alibi", "mapped", "model.embedding_norm", ""),
        ("--embed-layernorm", "not-modelled", None, "where no positions are added"),
        ("--no-position-embedding --position-embedding-type alibi", "no-effect", None, "no table"),
        (f"--pp-partition-method 'type:transformer|embedding' {STAGES} 2", "mapped", "layout.stages", ""),
        (f"--pp-partition-method type:transformer {STAGES} 4", "mapped", "layout.stages", ""),
        (f"--pp-partition-method 'type:transformer|embedding' {STAGES} 4", "not-modelled", None, "not even"),
        (f"--pp-partition-method parameters {STAGES} 4", "not-modelled", None, "not how many layers"),
        ("--pp-partition-method parameters", "no-effect", None, "makes it count"),
        ("--eval-only True", "refused", None, "only evaluated"),
        ("--skip-train-iteration-range 13-14 16-19", "no-effect", None, "when the run ends"),
        ("--log-level-replica error", "no-effect", None, ""),
        ("--optimizer sgd", "mapped", "optimizer.name", ""),
        ("--optimizer muon", "mapped", "optimizer.name", ""),
        ("--optimizer lion", "refused", "optimizer.name", "a plan has adamw, muon, sgd"),
        ("--sgd-momentum 0.8 --optimizer sgd", "mapped", "optimizer.momentum", ""),
        ("--sgd-momentum 0.8", "no-effect", None, "counts for SGD"),
        ("--adam-eps 1e-6 --optimizer sgd", "no-effect", None, "counts for Adam"),
        ("--muon-nesterov --optimizer muon", "mapped", "optimizer.nesterov", ""),
        ("--muon-nesterov", "no-effect", None, "counts for Muon"),
        ("--tensor-model-parallel-size two", "refused", None, "not a whole number"),
        ("--tensor-model-parallel-size", "refused", None, "no value"),
        ("--clip-grad $CLIP", "refused", None, "--variable CLIP=VALUE"),
        ("--recompute-granularity all", "refused", "recompute.mode", "full and selective"),
        ("--moe-layer-freq 2", "no-effect", None, "makes it count"),
        (
            "--moe-layer-freq [0,1,1,0,1,1,0,1] --num-experts 4",
            "refused",
            "model.expert_layer_step",
            "every n-th layer",
        ),
        ("--moe-layer-freq 2 --num-experts 4", "mapped", "model.first_dense_layers, model.expert_layer_step", ""),
        ("--apply-layernorm-1p", "mapped", "model.norm_offset", ""),
        ("--quick-geglu", "mapped", "model.activation", ""),
        ("--activation-func-clamp-value 7.0 --quick-geglu", "mapped", "model.gate_limit", ""),
        ("--glu-linear-offset 1.0 --swiglu", "mapped", "model.gate_offset", ""),
        ("--glu-linear-offset 1.0", "no-effect", None, "does not have"),
        (f"--moe-shared-expert-gate {SHARED}", "mapped", "model.shared_expert_gate", ""),
        ("--retro-add-retriever", "refused", None, "retrieval"),
        ("$EXTRA", "refused", None, "it may hold any arguments"),
    ],
)
def test_what_becomes_of_an_argument(arguments, status, key, words):
    settings = imported(BASE + arguments, num_devices=8).settings
    (found,) = [each for each in settings if each.flag == arguments.split()[0] and each.line]
    assert (found.status, found.line) == (status, 1)
    assert words in found.why
    assert key is None or found.key == key


def test_the_last_of_one_argument_counts():
    found = imported(BASE + "--tensor-model-parallel-size 2\n--tensor-model-parallel-size 4", num_devices=8)
    assert found.values["layout"]["tp"].value == 4
    earlier = [each for each in found.settings if each.value == "2" and each.line]
    assert [each.why for each in earlier] == ["it is given again on line 2, which counts"]


@pytest.mark.parametrize(
    ("arguments", "version"),
    [("--DDP-impl local", "2.5 to 2.6"), ("--moe-router-topk 2 --num-experts 4", "0.5 or later"), ("", "2.5 or later")],
)
def test_the_release_follows_from_the_arguments(arguments, version):
    assert imported(BASE + arguments, num_devices=8).version == version


def test_a_named_release_has_its_own_arguments_and_vocabulary():
    text = BASE + "--tokenizer-type NullTokenizer --vocab-size 1024 --cp-comm-type p2p"
    older, newer = (
        import_file(Request(text, "x.sh", num_devices=8), name) for name in ("megatron:0.8", "megatron:0.20")
    )
    assert older is not None and newer is not None
    assert older.values["model"]["vocab_size"].value == 1152  # one token more, for the end of documents
    assert newer.values["model"]["vocab_size"].value == 1024


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("([0]*3+[1]*2)", [0, 0, 0, 1, 1]),
        ("[0,1]*2", [0, 1, 0, 1]),
        ("2", 2),
        ("[0]*10**9", None),
        ("__import__('os')", None),
        ("[0]*99999999", None),
    ],
)
def test_patterns_of_layers_are_read_and_not_executed(text, pattern):
    assert layer_pattern(text) == pattern


def test_the_table_is_whole():
    flags = all_flags()
    assert len(flags) > 1000
    for flag in flags.values():
        assert flag.status in STATUSES
        assert flag.status == "mapped" or flag.why, flag.name
        assert flag.first in RELEASES and flag.last in RELEASES, flag.name
        assert flag.arity in ("0", "1", "?", "+", "*") or flag.arity.isdigit(), flag.name
    keys = {key.dotted for key in KEYS}
    assert {row.key for rows in UNDER.values() for row in rows} <= keys


@pytest.mark.parametrize("path", sorted((HERE.parents[2] / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_a_plan_is_no_script(path):
    assert import_file(Request(path.read_text(), path.name)) is None


# -- and back ----------------------------------------------------------------------------------------------------------

ALWAYS_LOST = {"model.name", "cluster.preset"}


@pytest.mark.parametrize(
    ("words", "version", "router"),
    [
        ("", None, True),
        ("--disable-bias-linear", None, False),
        ("", "0.14", False),
        ("", "0.15", True),
    ],
)
def test_routers_have_a_bias_where_products_have_one_since_core_0_15(words, version, router):
    text = BASE + f"--num-experts 4 --moe-router-topk 2 {words}"
    found = import_file(Request(text, "x.sh", num_devices=8), f"megatron:{version}" if version else None)
    plan = any_plan(found.values, "x.sh")
    assert plan.model.router_bias is router and plan.model.bias is (words == "")


def test_latent_attention_has_no_bias_of_queries():
    latent = "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 "
    found = imported(BASE + latent + "--disable-bias-linear --add-qkv-bias", num_devices=8)
    assert not any_plan(found.values, "x.sh").model.qkv_bias
    (said,) = [each for each in found.settings if each.flag == "--add-qkv-bias"]
    assert (said.status, said.why) == ("no-effect", "projections of latent attention have no bias")


LATENT = "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 "


def test_of_latent_attention_only_the_output_product_has_a_bias():
    model = any_plan(imported(BASE + LATENT + "--qk-layernorm", num_devices=8).values, "x.sh").model
    assert (model.bias, model.attention_output_bias, model.mlp_bias, model.qk_norm) == (False, True, True, False)
    without = any_plan(imported(BASE + LATENT + "--disable-bias-linear", num_devices=8).values, "x.sh").model
    assert not (without.bias or without.attention_output_bias or without.mlp_bias)


def test_low_rank_vectors_that_megatron_does_not_norm_are_said():
    plain, normed = (imported(BASE + LATENT + words, num_devices=8) for words in ("", "--qk-layernorm"))
    assert [any("--qk-layernorm" in each for each in found.assumed) for found in (plain, normed)] == [True, False]


YARN = "--position-embedding-type yarn --rotary-scaling-factor 8 "


def test_yarn_without_latent_attention_is_that_of_megatron():
    words = YARN + "--yarn-original-max-position-embeddings 2048 --yarn-beta-fast 16 --yarn-beta-slow 2 --mscale 0.5 "
    found = imported(BASE + words + "--no-yarn-correction-range-round-to-int", num_devices=8)
    model = any_plan(found.values, "x.sh").model
    assert (model.rope_scaling, model.rope_factor, model.rope_original_positions) == ("yarn", 8.0, 2048)
    assert (model.rope_beta_fast, model.rope_beta_slow, model.rope_truncate) == (16.0, 2.0, False)
    # 0.1 * 0.5 * ln 8 + 1, which nothing divides
    assert rotary_growth(model) == pytest.approx(1.10397, abs=1e-5)
    assert {each.status for each in found.settings if "yarn" in each.flag} == {"mapped"}
    usual = any_plan(imported(BASE + YARN, num_devices=8).values, "x.sh").model
    assert (usual.rope_original_positions, usual.rope_beta_fast, usual.rope_truncate) == (4096, 32.0, True)
    assert rotary_growth(usual) == pytest.approx(1.20794, abs=1e-5)
    still = imported(BASE + "--position-embedding-type yarn", num_devices=8)
    assert any_plan(still.values, "x.sh").model.rope_scaling == "none"


def test_deepspeeds_cut_counts_both_ends_as_layers():
    words = "--pipeline-model-parallel-size 2 --pp-partition-method 'type:transformer|embedding'"
    assert imported(BASE + words, num_devices=8).values["layout"]["stages"].value == "Et*4|t*4L"


def test_positions_of_a_fork_are_written_for_it_and_said():
    words = BASE + "--position-embedding-type alibi --embed-layernorm --vocab-size 1000"
    plan = any_plan(imported(words, num_devices=8).values, "x.sh")
    assert (plan.model.position, plan.model.embedding_norm) == ("alibi", True)
    exported = write(plan)
    again = any_plan(imported(exported.files[0][1], num_devices=8).values, "x.sh")
    assert (again.model.position, again.model.embedding_norm) == ("alibi", True)
    assert "bigscience" in dict(exported.lost)["model.position"]
    assert "bigscience" in dict(exported.lost)["model.embedding_norm"]


def test_layers_that_are_otherwise_are_counted_as_megatron_counts_them():
    words = "--position-embedding-type rope --rotary-percent 0.25 --window-size 127,0 --softmax-type learnable "
    fields = {}
    for flags in ("--no-rope-freq 4 --window-attn-skip-freq 2", "--no-rope-freq '([0]*3+[1])*2'"):
        values = imported(BASE + words + flags, num_devices=8).values["model"]
        fields |= {name: values[name].value for name in values if name.startswith(("rope_", "window", "attention_s"))}
    assert fields["rope_layers"] == [1, 1, 1, 0] and fields["window_layers"] == [1, 0]
    assert fields["rope_dim"] == 16 and fields["attention_sinks"] is True


@st.composite
def batches_and_rates(draw, dp: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of batches that may change, and of schedules that Megatron has: those of a run whose batches change count
    samples there."""
    batch = draw(
        st.sampled_from(
            [
                {},
                {"rampup": [2 * dp, 2 * dp, 300]},
                {"schedule": f"0:{4 * dp} 0.5M:{8 * dp}", "schedule_unit": "tokens"},
            ]
        )
    )
    rates: dict[str, Any] = draw(
        st.sampled_from(
            [
                {},
                {"warmup_steps": 10, "initial_learning_rate": 1e-6},
                {"schedule": "linear"},
                {"schedule": "cosine", "warmup_fraction": 0.25, "minimum_learning_rate": 1e-5},
                {"schedule": "inverse_sqrt", "warmup_steps": 7, "decay_steps": 900},
                {"schedule": "wsd", "decay_steps": 90, "wsd_decay_steps": 30, "wsd_decay": "minus_sqrt"},
                {"schedule": "wsd", "decay_steps": 90, "wsd_decay_steps": 30, "warmup_steps": 3},
                {"weight_decay_schedule": "cosine", "end_weight_decay": 0.3},
            ]
        )
    )
    by_samples = rates and (batch or draw(st.booleans()))
    return batch, {**rates, "counted_in": "samples"} if by_samples else rates


@st.composite
def plans(draw) -> Plan:
    """Plans that Megatron can run: every degree, dense and with experts."""
    tp, cp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    moe, latent = draw(st.booleans()), draw(st.booleans())
    heads = draw(st.sampled_from([8, 16]))
    model = {
        "num_layers": 8 * draw(st.sampled_from([1, 2])),
        "hidden_size": 512,
        "num_heads": heads,
        "ffn_hidden_size": draw(st.sampled_from([1024, 2048])),
        "vocab_size": 512 * draw(st.integers(1, 200)),
        "max_positions": 1024,
        "activation": draw(st.sampled_from(["gelu", "gelu_tanh", "swiglu", "relu_squared"])),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "bias": draw(st.booleans()),
        "tied_embeddings": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "hidden_dropout": draw(st.sampled_from([0.0, 0.1])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
    }
    if latent:
        model |= {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
        model |= {"q_lora_rank": draw(st.sampled_from([0, 96]))}
        del model["qk_norm"]
        if model.pop("bias"):
            model |= {"attention_output_bias": True, "mlp_bias": True}
        if draw(st.booleans()):
            model |= {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_positions": 4096}
            model |= {"rope_mscale": 1.0, "rope_mscale_all_dim": draw(st.sampled_from([0.0, 0.5]))}
    else:
        model |= {"num_kv_heads": draw(st.sampled_from([4, heads]))}
        model |= {"position": draw(st.sampled_from(["rope", "learned"]))}
        if model["position"] == "rope" and draw(st.booleans()):
            model |= {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_positions": 2048}
            model |= {"rope_beta_fast": 16.0, "rope_truncate": draw(st.booleans()), "rope_mscale": 1.0}
        if model["position"] == "rope":
            model |= {"rope_theta": draw(st.sampled_from([10000.0, 500000.0]))}
            model |= {"rope_dim": draw(st.sampled_from([0, 16]))}
            model |= {"rope_layers": draw(st.sampled_from([[], [1, 1, 1, 0], [0, 1], [1, 1, 0]]))}
        model |= {"attention_sinks": draw(st.booleans())}
        if draw(st.booleans()):
            window = {"sliding_window": 128, "window_layers": draw(st.sampled_from([[], [1, 0], [0, 0, 1]]))}
            model |= window
    dp = draw(st.sampled_from([2, 4]))
    layout = {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "dp": dp, "zero": draw(st.sampled_from([0, 1]))}
    layout |= {"sequence_parallel": tp > 1 and draw(st.booleans())}
    if moe:
        model |= {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 256}
        model |= {"num_shared_experts": draw(st.sampled_from([0, 1])), "first_dense_layers": draw(st.integers(0, 2))}
        model |= {"expert_layer_step": draw(st.sampled_from([1, 2]))}
        if model["num_shared_experts"]:
            model |= {"shared_expert_gate": draw(st.booleans())}
            model |= draw(st.sampled_from([{}, {"shared_expert_ffn_hidden_size": 384}]))
        biased = model.get("bias", model.get("mlp_bias", False))
        model |= {"router_scores": draw(st.sampled_from(["softmax", "sigmoid"])), "router_bias": biased}
        layout |= {"ep": draw(st.sampled_from([1, 2])), "etp": draw(st.sampled_from([1, tp]))}
    recompute = draw(
        st.sampled_from(
            [
                'mode = "none"',
                'mode = "full"',
                'mode = "full"\nnum_layers = 1',
                'mode = "selective"\nmodules = ["norm"]',
            ]
        )
    )
    dtype = draw(st.sampled_from(["bf16", "fp16", "fp8", "fp32"]))
    seed, rate = draw(st.integers(0, 9999)), draw(st.sampled_from([1e-4, 3e-4, 0.00015]))
    devices = tp * cp * pp * dp
    batch, rates = draw(batches_and_rates(dp))
    sections = {
        "model": model,
        "cluster": {"preset": "dgx-h100", "num_devices": devices},
        "runtime": {"profile": "megatron-te", "attention": draw(st.sampled_from(["fused", "unfused"]))},
        "layout": layout,
        "batch": {"global": dp * 8, "micro": draw(st.sampled_from([1, 2])), "sequence": 1024, **batch},
        "precision": {"dtype": dtype},
        "schedule": {"name": "Interleaved1F1B" if vpp > 1 else "1F1B"},
        "data_parallel": {"overlap_grad_reduce": draw(st.booleans()), "bucket_bytes": draw(st.integers(1, 9)) * 4000},
        "train": {"seed": seed, "learning_rate": rate, "steps": draw(st.integers(1, 50))},
        "optimizer": {"betas": [0.9, draw(st.sampled_from([0.95, 0.999]))], "weight_decay": 0.1, **rates},
    }
    text = "".join(
        f"[{section}]\n" + "".join(f"{name} = {json.dumps(each)}\n" for name, each in table.items())
        for section, table in sections.items()
    )
    return Plan.from_toml(f"{text}[recompute]\n{recompute}\n")


@sampled("count", [15, 100], on_push=1)
def test_plans_survive_the_way_there_and_back(count):
    settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))(given(plans())(survives))()


def survives(plan: Plan) -> None:
    exported = write(plan)
    ((path, text),) = exported.files
    found = imported(text, path)
    assert not list(found.of_status("refused"))
    again = any_plan(found.values, path)
    assert {key for key, _ in exported.lost} <= ALWAYS_LOST
    for section in ("model", "cluster", "layout", "batch", "precision", "recompute", "schedule", "optimizer", "train"):
        mine, other = (getattr(each, section) for each in (plan, again))
        if section == "model":
            mine = dataclasses.replace(mine, name="custom")
        assert mine == other or all(
            getattr(mine, field.name) is None or getattr(mine, field.name) == getattr(other, field.name)
            for field in dataclasses.fields(mine)
        ), section


@st.composite
def uneven_plans(draw: st.DrawFn) -> Plan:
    """Plans whose stages have layers of any number, the first and the last none too, in any form of the string."""
    pp, vpp = draw(st.sampled_from([2, 3, 4, 8])), draw(st.sampled_from([1, 2, 3]))
    counts = draw(st.lists(st.integers(1, 5), min_size=pp * vpp, max_size=pp * vpp))
    counts[0], counts[-1] = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    counts[0] += not any(counts)
    cells = ["t" * count if draw(st.booleans()) or not count else f"t*{count}" for count in counts]
    plan = Plan.from_toml(
        f'[model]\npreset = "llama3-8b"\nnum_layers = {sum(counts)}\n[cluster]\npreset = "dgx-h100"\n'
        f'[runtime]\nprofile = "megatron-te"\n[layout]\npp = {pp}\nvpp = {vpp}\nstages = "E{"|".join(cells)}L"\n'
        f"[batch]\nglobal = {8 * pp}\nsequence = 1024\n"
        f'[schedule]\nname = "{"Interleaved1F1B" if vpp > 1 else "1F1B"}"\n'
    )
    assert layers_written(plan.layout.stages) == counts
    return plan


@sampled("count", [10, 100], on_push=1)
def test_layout_strings_of_uneven_plans_survive_the_way_there_and_back(count):
    def both_ways(plan: Plan) -> None:
        ((path, text),) = write(plan).files
        assert f"--pipeline-model-parallel-layout {shlex.quote(plan.layout.stages)} " in text
        again = any_plan(imported(text, path).values, path)
        assert (again.layout, again.stages, again.schedule) == (plan.layout, plan.stages, plan.schedule)

    settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))(
        given(uneven_plans())(both_ways)
    )()


def test_what_a_script_cannot_say_is_lost_with_its_reason():
    text = (HERE.parents[2] / "examples" / "llama70b_512.toml").read_text()
    plan = Plan.from_toml(text.replace('preset = "dgx-h100"', 'preset = "dgx-a100-80g"'))
    plan = dataclasses.replace(plan, numerics=dataclasses.replace(plan.numerics, gradient_token_block=64))
    lost = dict(write(plan).lost)
    assert lost["numerics.gradient_token_block"] == "its sums have no fixed order"
    assert "hardware" in lost["cluster.preset"]
    assert all(lost.values())


def test_export_prints_the_json_that_is_promised(capsys, tmp_path):
    example = str(HERE.parents[2] / "examples" / "llama70b_512.toml")
    assert main(["export", example, "--to", "megatron", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [*report] == ["to", "files", "lost"]
    assert report["to"] == "megatron"
    assert "--tensor-model-parallel-size 4" in report["files"][0]["text"]
    script = tmp_path / "pretrain.sh"
    assert main(["export", example, "--to", "megatron", "-o", str(script)]) == 0
    capsys.readouterr()
    assert main(["import", str(script), "--json"]) == 0
    account = json.loads(capsys.readouterr().out)
    assert Plan.from_toml(account["plan"]).layout == Plan.from_toml(Path(example).read_text()).layout


MUON = "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-num-ns-steps 5 --muon-coefficient-type simple "


@pytest.mark.parametrize(
    ("arguments", "optimizer", "assumed"),
    [
        ("--optimizer sgd", {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01}, []),
        (f"{MUON}--muon-extra-scale-factor 0.2", {"momentum": 0.95, "nesterov": True, "muon_scale": "match_rms"}, []),
        (f"{MUON}--muon-scale-mode shape_scaling", {"muon_scale": "original"}, []),
        (
            "--optimizer muon",
            {"name": "muon", "momentum": 0.9, "nesterov": False, "muon_scale": "match_rms"},
            ["scaled by spectral times 1,", "not Megatron's quintic"],
        ),
    ],
)
def test_sgd_and_muon_are_read_with_megatrons_defaults_and_what_no_plan_has_is_said(arguments, optimizer, assumed):
    found = imported(BASE + arguments, num_devices=8)
    plan = build_plan(found.values, "train.sh")
    assert {name: getattr(plan.optimizer, name) for name in optimizer} == optimizer
    said = [each for each in found.assumed if "Muon" in each]
    assert len(said) == len(assumed) and all(words in each for words, each in zip(assumed, said, strict=True))


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer("sgd", momentum=0.8),
        Optimizer("muon"),
        Optimizer("muon", momentum=0.9, nesterov=False, muon_scale="original", muon_steps=6, betas=(0.8, 0.9)),
    ],
)
def test_other_optimizers_are_written_and_read_back(optimizer):
    plan = dataclasses.replace(build_plan(imported(BASE, num_devices=8).values, "train.sh"), optimizer=optimizer)
    written = write(plan)
    assert not [key for key, _ in written.lost if key.startswith("optimizer")]
    again = build_plan(imported(written.files[0][1], num_devices=8).values, "train.sh").optimizer
    assert (again.name, again.own_momentum, again.own_nesterov) == (
        optimizer.name,
        optimizer.own_momentum,
        optimizer.own_nesterov,
    )
    assert (again.muon_scale, again.muon_steps, again.betas) == (
        optimizer.muon_scale,
        optimizer.muon_steps,
        optimizer.betas,
    )


@pytest.mark.parametrize(
    "batches, steps",
    [
        ("--global-batch-size 8", 5),
        ("--step-batch-size-schedule 0:4 4096:8", 7),
        ("--global-batch-size 8 --rampup-batch-size 4 4 9", 6),
    ],
)
def test_samples_are_steps_as_megatron_counts_them(batches, steps):
    """42 samples: a list of batches goes on until all are taken, others leave out what is no whole batch."""
    text = f"{RATES}--train-samples 42 {batches}"
    assert any_plan(imported(text).values, "").train.steps == steps


def test_a_list_of_batches_that_has_lost_its_quotes_is_one_list():
    """Megatron's own example gives it in quotes inside an array that it expands without."""
    given = (f"{RATES}--train-iters 9 --step-batch-size-schedule {text}" for text in ('"0:4 1M:8"', "0:4 1M:8"))
    quoted, split = (any_plan(imported(text).values, "").batch for text in given)
    assert split == quoted and quoted.schedule == "0:4 1M:8" and quoted.global_size == 8
