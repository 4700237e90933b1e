"""torchtitan's configurations: recognised, accounted for, refused with reasons, and written."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import PlanError, ShardproofError
from shardproof.core.imports import torchtitan
from shardproof.core.imports.account import Imported, Request
from shardproof.core.imports.given import import_file
from shardproof.core.imports.torchtitan_apart import SPELLINGS
from shardproof.core.imports.torchtitan_models import MODELS, NOT_EXPRESSED
from shardproof.core.imports.torchtitan_pipeline import stage_string
from shardproof.core.imports.torchtitan_table import TABLE
from shardproof.core.imports.torchtitan_write import write
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.keys import KEYS
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.plan import Plan, any_plan

EIGHT = '[model]\nname = "llama3"\nflavor = "8B"\n'


def account(text: str, devices: int | None = 64, name: str = "run.toml") -> Imported:
    imported = import_file(Request(text, name, devices))
    assert imported is not None, text
    return imported


def refusal(text: str, devices: int | None = 64) -> str:
    (refused,) = account(text, devices).of_status("refused")
    return f"{refused.flag}:{refused.line}: {refused.why}"


def value(text: str, key: str, devices: int | None = 64):
    imported = account(text, devices)
    imported.raise_refused()
    section, _, name = key.partition(".")
    given = imported.values.get(section, {}).get(name)
    return None if given is None else given.value


@pytest.mark.parametrize(
    ("text", "name", "ours"),
    [
        ('[model]\npreset = "tiny-llama"\n[layout]\ntp = 2\n', "plan.toml", True),
        ("[layout]\ntp = 2\n[training]\nsteps = 2\n", "plan.toml", True),
        ('[train]\ndata = """\n[training]\n"""\n[batch]\nglobal = 1\n', "plan.toml", True),
        ('[model]\npreset = "tiny-llama"\n', "plan.toml", True),
        ("[layout]\n[training\n", "plan.toml", True),
        ("[training]\nsteps = 2\n", "run.toml", False),
        ("training = { steps = 2 }\n[metrics]\nlog_freq = 1\n", "run.toml", False),
        ("[job]\nbroken =\n", "run.toml", False),
        ("[parallelism]\n[training]\n", "anything", False),
    ],
)
def test_a_plan_is_never_taken_for_torchtitan_nor_the_other_way_round(text: str, name: str, ours: bool):
    assert torchtitan.recognises(Request(text, name)) is not ours


def test_a_broken_torchtitan_file_is_reported_as_broken_toml_with_its_line():
    with pytest.raises(PlanError, match=r"run\.toml:2: this is not TOML"):
        account("[job]\nbroken =\n")


def test_every_setting_of_the_file_is_accounted_for_in_its_order():
    text = EIGHT + "[training]\nseq_len = 4096\n[metrics]\nlog_freq = 1\n[lr_scheduler]\nwarmup_steps = 2\n"
    settings_of_file = [each for each in account(text).settings if each.line]
    assert [(each.flag, each.line, each.status) for each in settings_of_file] == [
        ("model.name", 2, "mapped"),
        ("model.flavor", 3, "mapped"),
        ("training.seq_len", 5, "mapped"),
        ("metrics.log_freq", 7, "no-effect"),
        ("lr_scheduler.warmup_steps", 9, "mapped"),
    ]


def test_what_is_not_said_counts_with_torchtitans_default_and_is_listed_without_a_line():
    imported = account("[training]\nsteps = 5\n" + EIGHT, 8)
    unsaid = {each.flag: each.value for each in imported.settings if not each.line}
    assert unsaid["training.local_batch_size"] == "8"
    assert unsaid["optimizer.weight_decay"] == "0.1"
    plan = any_plan(imported.values, "run.toml")
    assert (plan.batch.sequence, plan.batch.global_size, plan.train.learning_rate) == (2048, 64, 0.0008)


def test_an_unknown_setting_is_refused_with_the_closest_and_its_line():
    assert refusal(EIGHT + "[parallelism]\ntensor_parallel_size = 2\n").startswith(
        "parallelism.tensor_parallel_size:5: torchtitan has no such setting in the releases that are read; "
        "did you mean "
        "'parallelism.tensor_parallel_degree'?"
    )


@pytest.mark.parametrize(
    ("written", "status"),
    [
        ("[debug]\ndeterministic = false\n", "no-effect"),
        ("[debug]\ndeterministic = true\n", "not-modelled"),
        ("[training]\nenable_loss_parallel = true\n", "no-effect"),
        ("[training]\nenable_loss_parallel = false\n", "not-modelled"),
        ("[optimizer]\nimplementation = 'fused'\n", "no-effect"),
        ("[optimizer]\nimplementation = 'for-loop'\n", "not-modelled"),
        ("[float8]\nfilter_fqns = ['output']\n", "no-effect"),
        ("[fault_tolerance]\nenable = true\n", "not-modelled"),
    ],
)  # fmt: skip
def test_a_switch_that_is_off_has_no_effect_and_one_that_is_on_is_said(written: str, status: str):
    assert [each.status for each in account(EIGHT + written).settings if each.line > 3] == [status]


def test_a_setting_of_a_fork_in_a_section_that_changes_no_step_is_let_pass():
    (own,) = [each for each in account(EIGHT + "[metrics]\nown = 2\n").settings if each.flag == "metrics.own"]
    assert own.status == "no-effect"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[training]\nseq_len = '2k'\n", "training.seq_len:5: this is '2k', and training.seq_len takes a "
            "whole number."),
        ("[training]\nseq_len = true\n", "training.seq_len:5: this is true, and training.seq_len takes a "
            "whole number."),
        ("[parallelism]\nfsdp_reshard_after_forward = 'sometimes'\n", "this is none of default, always, never"),
        ("[parallelism]\ntensor_parallel_degree = 0\n", "a degree is at least 1."),
        ("[parallelism]\ntensor_parallel_degree = 3\n", "the other degrees take 3 devices"),
        ("[parallelism]\ndata_parallel_shard_degree = 2\n", "the degrees of the file take 2 devices, and "
            "--devices says 64"),
        ("[activation_checkpoint]\nmode = 'memory_budget'\n", "the compiler chooses by a budget"),
        ("[activation_checkpoint]\nselective_ac_option = 'some'\n", "this is 'op', or a number"),
        ("[optimizer]\nname = 'Lion'\n", "a plan has AdamW, Adam, SGD, Muon"),
        ("[training]\nenable_cpu_offload = true\n", "rest in host memory"),
        ("[training]\nglobal_batch_size = 7\n", "takes a multiple of 512"),
        ("[compile]\nenable = true\n[training]\ncompile = false\n", "compile.enable says the same thing in line 5"),
        ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'ZBH1'\n", "none of torchtitan's"),
        ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 4\n", "make 9 "
            "stages on 2 ranks"),
        ("[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_microbatch_size = 3\n", "not whole "
            "microbatches"),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 32\ndata_parallel_shard_degree = "
                "1\ntensor_parallel_degree = 2\n",
            "torchtitan replicates without sharding",
        ),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_say_is_refused_with_the_reason(more: str, said: str):
    assert said in refusal(EIGHT + more)


def test_a_degree_that_is_left_to_the_devices_needs_their_number():
    assert "say how many there are, --devices N, a multiple of 8." in refusal(
        EIGHT + "[parallelism]\ntensor_parallel_degree = 8\n", None
    )


@pytest.mark.parametrize(("family", "flavor"), [(name, each) for name in NOT_EXPRESSED for each in NOT_EXPRESSED[name]])
def test_models_that_our_layers_do_not_express_are_refused_with_the_field(family: str, flavor: str):
    text = f'[model]\nname = "{family}"\nflavor = "{flavor or "any"}"\n[training]\nsteps = 1\n'
    assert NOT_EXPRESSED[family][flavor] in refusal(text)


@pytest.mark.parametrize(("family", "flavor"), [(name, each) for name, flavors in MODELS.items() for each in flavors])
def test_every_flavor_is_a_model_that_can_be_written_and_read(family: str, flavor: str):
    text = f'[model]\nname = "{family}"\nflavor = "{flavor}"\n[training]\nlocal_batch_size = 1\n'
    plan = any_plan(account(text, 8).values, "run.toml")
    assert isinstance(plan, Plan)
    assert f'name = "{family}"\nflavor = "{flavor}"' in write(plan).files[0][1]


def test_sizes_of_llama_are_those_of_the_published_models():
    """torchtitan computes the width of the MLP; the presets have it from the models' own files."""
    known = {"405B": "llama3.1-405b", "70B": "llama3.1-70b"}
    assert {each: MODELS["llama3"][each]["preset"] for each in known} == known
    assert MODELS["llama4"]["17bx16e"]["ffn_hidden_size"] == 16384
    assert MODELS["llama2"]["26B"]["ffn_hidden_size"] == model_preset("llama2-13b").ffn_hidden_size


@pytest.mark.parametrize(
    ("parallelism", "zero"),
    [
        ("", 3),
        ("pipeline_parallel_degree = 2", 2),
        ("pipeline_parallel_degree = 2\nfsdp_reshard_after_forward = 'always'", 3),
        ("fsdp_reshard_after_forward = 'never'", 2),
        ("data_parallel_replicate_degree = 64\ndata_parallel_shard_degree = 1", 0),
        ("context_parallel_degree = 64\ndata_parallel_shard_degree = 1", 3),
    ],
)
def test_the_zero_stage_follows_from_the_degrees_and_the_policy(parallelism: str, zero: int):
    assert value(f"{EIGHT}[parallelism]\n{parallelism}\n", "layout.zero") == zero


def test_without_fsdp_tensor_parallel_runs_compute_in_fp32_as_torchtitan_warns():
    assert value(f"{EIGHT}[parallelism]\ntensor_parallel_degree = 64\n", "precision.dtype") == "fp32"
    assert value(EIGHT, "precision.dtype") == "bf16"


def test_accumulation_that_drains_the_pipeline_is_said():
    text = EIGHT + "[training]\nglobal_batch_size = 512\n[parallelism]\npipeline_parallel_degree = 2\n"
    (said,) = [each for each in account(text).of_status("not-modelled") if each.flag == "training.global_batch_size"]
    assert "drains the pipeline after each of the 2 accumulation steps" in said.why


def test_the_table_names_keys_that_plans_have():
    known = {key.dotted for key in KEYS}
    named = {key for row in TABLE.values() for key in (row.key or "").split(", ") if key}
    assert named <= known
    assert set(SPELLINGS.values()) <= set(TABLE)
    assert not set(SPELLINGS) & set(TABLE)


def test_a_model_of_the_user_stands_in_for_a_flavor_that_is_not_known():
    text = '[model]\nflavor = "mine"\n[training]\nsteps = 1\n'
    assert "did you mean" not in refusal(text)
    assert "Give its shape by --model" in refusal(text)
    from shardproof.core.plan.toml import Given

    request = Request(text, "run.toml", 8, {"preset": Given("llama3-8b", "--model")})
    imported = import_file(request)
    assert imported is not None
    assert not any(imported.of_status("refused"))


def test_a_plan_that_torchtitan_does_not_run_is_not_written():
    """Its experts are spread over ranks that share parameters: here 2 * 4, on which 4 * 4 do not go."""
    plan = Plan.from_toml(
        '[model]\npreset = "qwen3-30b-a3b"\n[cluster]\npreset = "dgx-h100"\nnum_devices = 16\n'
        "[layout]\ntp = 4\ndp = 4\nep = 4\netp = 4\nzero = 3\nsequence_parallel = true\n"
        "[data_parallel]\nshard = 2\n[batch]\nglobal = 64\nsequence = 2048\n"
    )
    with pytest.raises(PlanError, match="experts are spread over the 8 ranks of shard, cp and tp"):
        write(plan)


def test_a_loss_that_is_compiled_alone_is_written_and_read():
    plan = Plan.from_toml(
        '[model]\npreset = "llama3.1-8b"\n[cluster]\npreset = "dgx-h100"\nnum_devices = 8\n[layout]\nzero = 3\n'
        '[runtime]\nprofile = "torchtitan"\ncompile = false\nfused_loss = true\n[batch]\nglobal = 64\nsequence = 2048\n'
    )
    exported = write(plan)
    assert exported.lost == ()
    assert '[compile]\nenable = true\ncomponents = ["loss"]' in exported.files[0][1]


MODELS_WRITTEN = ("llama3.1-8b", "llama3.1-70b", "qwen3-32b", "qwen3-30b-a3b", "llama2-7b", "tiny-llama")
SINGLE, MULTI = ("1F1B", "GPipe"), ("Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")


RATES = (
    "",
    'schedule = "linear"',
    'schedule = "cosine"\nminimum_learning_rate = 3e-7\ndecay_steps = 77',
    f"warmup_steps = 9\ninitial_learning_rate = {1e-5 / 10!r}",
    'schedule = "wsd"\ndecay_steps = 90\nwsd_decay_steps = 31\nwsd_decay = "minus_sqrt"',
    f'schedule = "wsd"\ndecay_steps = 90\nwsd_decay_steps = 31\nwsd_decay = "cosine"\nminimum_learning_rate = 7e-6\n'
    f"warmup_steps = 12\ninitial_learning_rate = {1e-5 / 13!r}",
)


def titan(step: int, *, warmup: int, total: int, ratio: float | None, form: str, least: float) -> float:
    """`components/lr_scheduler.py`, from its description."""
    warmup = min(warmup, total)
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    if step < warmup:
        return (step + 1) / warmup
    if step < total + 1 - decay:
        return 1.0
    progress = (step + 1 - (total + 1 - decay)) / decay
    left = {"linear": 1 - progress, "sqrt": 1 - progress**0.5, "cosine": (1 + math.cos(math.pi * progress)) / 2}[form]
    return least + (1 - least) * left


@pytest.mark.parametrize("ratio", [None, 0.0, 0.25, 0.95])
@pytest.mark.parametrize("warmup", [0, 1, 2, 20, 60])
@pytest.mark.parametrize(("form", "least"), [("linear", 0.0), ("cosine", 0.1), ("sqrt", 0.0)])
def test_the_rate_of_every_step_is_torchtitans(ratio, warmup, form, least):
    lines = [f"warmup_steps = {warmup}", f'decay_type = "{form}"', f"min_lr_factor = {least}"]
    lines += [] if ratio is None else [f"decay_ratio = {ratio}"]
    text = EIGHT + "[training]\nsteps = 50\n[optimizer]\nlr = 1e-3\n[lr_scheduler]\n" + "\n".join(lines) + "\n"
    plan = any_plan(account(text).values, "")
    assert isinstance(plan, Plan)
    rates = plan.rates
    own = {"warmup": warmup, "total": 50, "ratio": ratio, "form": form, "least": least}
    assert [rates.learning_rate(step) for step in range(50)] == pytest.approx(
        [1e-3 * titan(step, **own) for step in range(50)], rel=1e-12
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans for torchtitan, whose stages are cut as torchtitan cuts them or evenly."""
    tp, pp, cp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 8), (1, 2, 4), (1, 2), (2, 4, 8)))
    schedule = draw(st.sampled_from(SINGLE + MULTI)) if pp > 1 else "1F1B"
    vpp = 2 if schedule in MULTI else 1
    micro, zero = draw(st.integers(1, 3)), draw(st.sampled_from((2, 3)))
    model = draw(st.sampled_from(MODELS_WRITTEN))
    layers = model_preset(model).num_layers
    mode = draw(st.sampled_from(("none", "full", "selective")))
    first = draw(st.integers(0, 1)) if pp * vpp > 1 and layers > 8 else 0
    text = [
        f'[model]\npreset = "{model}"' + ("\nexpert_bias = true" if "a3b" in model else ""),
        f'[cluster]\npreset = "dgx-h100"\nnum_devices = {tp * pp * cp * dp}',
        f'[runtime]\nprofile = "torchtitan"\ncompile = {str(draw(st.booleans())).lower()}',
        f"[layout]\ntp = {tp}\npp = {pp}\nvpp = {vpp}\ncp = {cp}\ndp = {dp}\nzero = {zero}",
        f"sequence_parallel = {str(tp > 1).lower()}",
        f"[batch]\nglobal = {micro * dp * draw(st.sampled_from((8, 16)))}\nmicro = {micro}\nsequence = 4096",
        f'[schedule]\nname = "{schedule}"',
        f'[recompute]\nmode = "{mode}"' + ('\nmodules = ["norm"]' if mode == "selective" else ""),
        f"[optimizer]\nbetas = [0.8, {draw(st.sampled_from((0.9, 0.95)))}]\neps = 1e-6\n{draw(st.sampled_from(RATES))}",
        f"[train]\nsteps = {draw(st.integers(1, 50))}\nseed = {draw(st.integers(0, 99))}\nlearning_rate = 1e-5",
    ]
    if first:
        counts = [layers // (pp * vpp)] * (pp * vpp)
        counts[0], counts[-1] = counts[0] - 1, layers - sum(counts[:-1]) + 1
        text.insert(5, f'stages = "{stage_string(counts)}"')
    try:
        return Plan.from_toml("\n".join(text))
    except ShardproofError:
        return draw(plans())


@pytest.mark.parametrize("number", [20, pytest.param(100, marks=pytest.mark.full)])
def test_written_plans_are_read_back_as_the_same(number: int):
    settings(max_examples=number, deadline=None)(given(plans())(is_read_back))()


def is_read_back(plan: Plan) -> None:
    """But for a model that torchtitan has not, nothing of such a plan is lost; read back it is the plan, key by key."""
    exported = write(plan)
    keys = [key for key, _ in exported.lost]
    if plan.model.name == "tiny-llama":
        assert keys == ["model.preset"]
        return
    assert keys == []
    imported = account(exported.files[0][1], plan.world_size)
    imported.raise_refused()
    read = any_plan(imported.values, "torchtitan.toml")
    assert isinstance(read, Plan)
    assert replace(read, cluster=plan.cluster, model=plan.model) == plan
    assert read.model.name == plan.model.name


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ('[layout]\ntp = 2\nzero = 0\n[schedule]\nname = "1F1B"\n', {"layout.zero", "layout.sequence_parallel"}),
        ('[layout]\nzero = 3\n[recompute]\nmode = "selective"\n', {"recompute.modules"}),
        ('[layout]\nzero = 3\norder = "tp-pp-dp-cp-ep"\n', {"layout.order"}),
        ('[layout]\nzero = 1\n[numerics]\nmode = "exact"\n', {"layout.zero", "numerics.mode", "runtime.profile"}),
        ('[layout]\npp = 2\nzero = 2\n[schedule]\nname = "ZBH1"\n', {"schedule.name", "runtime.profile"}),
        ('[layout]\nzero = 3\n[offload]\nactivations = 2\n', {"offload.activations", "runtime.profile"}),
    ],
)  # fmt: skip
def test_what_torchtitan_cannot_say_is_in_the_list_of_what_is_lost(change: str, lost: set[str]):
    base = '[model]\npreset = "llama3.1-8b"\n[cluster]\npreset = "dgx-h100"\nnum_devices = 8\n[batch]\nglobal = 64\n'
    profile = "" if "runtime.profile" in lost else '[runtime]\nprofile = "torchtitan"\n'
    exported = write(Plan.from_toml(f"{base}sequence = 2048\n{profile}{change}"))
    assert {key for key, _ in exported.lost} == lost
    assert all(why for _, why in exported.lost)


@pytest.mark.parametrize(
    ("name", "own"), [("AdamW", Optimizer()), ("SGD", Optimizer("sgd", momentum=0.0)), ("Muon", Optimizer("muon"))]
)
def test_optimizers_have_the_names_of_torch_and_its_defaults(name: str, own: Optimizer):
    imported = account(f"{EIGHT}[optimizer]\nname = '{name}'\n")
    plan = any_plan(imported.values, "run.toml")
    own = replace(own, muon_scale="original") if name == "Muon" else own
    assert isinstance(plan, Plan)
    for key in ("name", "betas", "eps", "weight_decay", "momentum", "nesterov", "muon_scale", "muon_steps"):
        assert getattr(plan.optimizer, key) == getattr(own, key)
    written = write(replace(plan, optimizer=own))
    assert "optimizer.name" not in dict(written.lost)
    assert (f'name = "{name}"' in written.files[0][1]) == (name != "AdamW")
