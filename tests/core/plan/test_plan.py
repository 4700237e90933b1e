"""Plan files: exact round trip, and every problem of a file at once, each with its line."""

import dataclasses
import tomllib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import shardproof.core.plan.build as build_module
import shardproof.core.plan.plan as plan_module
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import CLUSTER_PRESETS, cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import MODEL_PRESETS, model_preset
from shardproof.core.plan.keys import KEYS, MODULE_KEYS, NOUNS
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.rules import RULES, broken_rules
from shardproof.core.plan.runtime import Recompute, Runtime
from shardproof.core.plan.sections import Batch, DataParallel, Numerics, Precision, ScheduleChoice
from shardproof.core.plan.train import Train
from shardproof.core.plan.write import toml_value
from shardproof.core.program.holdings import num_shards

GPT3 = """\
[model]
preset = "gpt3-175b"
[cluster]
preset = "dgx-a100-80g"
num_devices = 1024
[runtime]
profile = "shardproof"
[layout]
tp = 8
pp = 8
vpp = 1
dp = 16
cp = 1
ep = 1
sequence_parallel = true
zero = 1
order = "tp-cp-ep-dp-pp"
[batch]
global = 1536
micro = 1
sequence = 2048
[precision]
dtype = "bf16"
[recompute]
mode = "selective"
[schedule]
name = "1F1B"
[numerics]
mode = "fast"
[train]
steps = 20
data = "python-stdlib"
seed = 1234
learning_rate = 3e-4
"""


def problems_of(text: str, source: str = "plan.toml") -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text, source)
    return caught.value.problems


def line_of(text: str, needle: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if needle in line)


def test_the_example_of_the_interface_parses():
    plan = Plan.from_toml(GPT3)
    assert plan.model == model_preset("gpt3-175b")
    assert plan.cluster == cluster_preset("dgx-a100-80g", 1024)
    assert plan.layout == Layout(tp=8, pp=8, dp=16, sequence_parallel=True, zero=1)
    assert (plan.num_microbatches, len(plan.stages)) == (96, 8)
    assert plan.samples_of(15) == (1440, 1536)


def test_the_example_round_trips():
    plan = Plan.from_toml(GPT3)
    assert Plan.from_toml(plan.to_toml()) == plan


RECOMPUTES = [
    Recompute(),
    Recompute("selective"),
    Recompute("full"),
    Recompute("full", 0),
    Recompute("selective", modules=("norm", "mlp")),
]
RECOMPUTES += [Recompute("full", layers=()), Recompute("full", layers=(1,))]


@st.composite
def plans(draw) -> Plan:
    names = ("tiny-gpt", "tiny-llama", "tiny-gpt-6h", "llama3-70b", "tiny-moe", "tiny-deepseek", "deepseek-v3")
    model = draw(st.sampled_from([model_preset(name) for name in names]))
    if draw(st.booleans()):
        model = dataclasses.replace(
            model, norm_eps=draw(st.floats(1e-12, 1e-3)), name=draw(st.sampled_from([model.name, 'a "name"\t\\']))
        )
    tp = draw(st.sampled_from([n for n in range(1, 9) if model.num_kv_heads % n == 0]))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if model.num_layers % n == 0]))
    interleaved = pp > 1 and model.num_layers % (2 * pp) == 0 and draw(st.booleans())
    dp, micro = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    stages = (
        "E" + "|" * (pp - 1) + f"t*{model.num_layers}L" if pp > 1 and not interleaved and draw(st.booleans()) else None
    )
    order = "-".join([*draw(st.permutations(("tp", "cp", "ep", "dp"))), "pp"])  # experts need pp last
    order = order if model.is_moe else "-".join(draw(st.permutations(("tp", "cp", "ep", "dp", "pp"))))
    cp, etp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([None, 1])) if model.is_moe else None
    ep = draw(
        st.sampled_from(
            [n for n in range(1, 9) if model.is_moe and model.num_experts % n == 0 and cp * dp % n == 0] or [1]
        )
    )
    vpp, zero = 2 if interleaved else 1, draw(st.integers(0, 3))
    split = etp is not None  # experts cut otherwise than attention need tokens that are cut, too
    layout = Layout(tp, pp, dp, cp, ep, etp, vpp=vpp, sequence_parallel=split, zero=zero, order=order, stages=stages)
    cluster = cluster_preset(draw(st.sampled_from(sorted(CLUSTER_PRESETS))), layout.world_size)
    assume(cluster.num_devices <= cluster.devices_per_node or cluster.num_devices % cluster.devices_per_node == 0)
    if draw(st.booleans()):
        sources = {
            **cluster.sources,
            "matmul_efficiency": draw(st.sampled_from(["set in the plan", "my bench\nof today"])),
        }
        name = draw(st.sampled_from([cluster.name, "mine"]))
        cluster = dataclasses.replace(cluster, name=name, matmul_efficiency=draw(st.floats(0.01, 1.0)), sources=sources)
    modes = ["fast"] if cp > 1 or model.is_moe or model.is_mla else ["fast", "exact"]
    return Plan(
        model,
        cluster,
        layout,
        Batch(micro * dp * draw(st.integers(1, 8)), micro, draw(st.sampled_from([16, 64, 128]))),
        runtime=draw(
            st.sampled_from(
                [Runtime(), Runtime("megatron-te", attention="unfused", p2p_overlap=False, cuda_graphs=True)]
            )
        ),
        precision=Precision(
            draw(st.sampled_from(sorted({"fp32", "bf16"} & {*cluster.peak_flops_per_s}))),
            draw(st.sampled_from([None, "bf16"])),
        ),
        recompute=draw(st.sampled_from(RECOMPUTES if split else [*RECOMPUTES, Recompute("full", distribute=True)])),
        data_parallel=DataParallel(draw(st.sampled_from([None, True, False])), shard=dp * cp if zero else None),
        schedule=ScheduleChoice("Interleaved1F1B" if interleaved else draw(st.sampled_from(["GPipe", "1F1B"]))),
        numerics=Numerics(
            draw(st.sampled_from(modes)), draw(st.sampled_from([None, 64])), draw(st.sampled_from([None, 16]))
        ),
        optimizer=Optimizer(betas=(draw(st.floats(0, 0.99)), 0.95), clip_grad_norm=draw(st.floats(0, 10))),
        train=Train(steps=draw(st.integers(0, 9)), learning_rate=draw(st.floats(0, 1))),
    )


@given(plans())
def test_any_plan_round_trips_exactly(plan):
    text = plan.to_toml()
    assert Plan.from_toml(text) == plan
    assert Plan.from_toml(text).to_toml() == text


@given(st.text())
def test_any_text_survives_as_a_toml_value(text):
    assume(all(not 0xD800 <= ord(letter) <= 0xDFFF for letter in text))
    assert tomllib.loads(f"value = {toml_value(text)}")["value"] == text


def test_all_problems_of_a_file_come_together_in_line_order():
    text = (
        GPT3.replace("tp = 8", "tp = 112")
        .replace("micro = 1", "micro = 5\nmirco = 2")
        .replace('"bf16"', '"bf61"')
        .replace("seed = 1234", 'seed = "a"')
        .replace("[numerics]", "[numeric]")
        .replace("zero = 1", "zero = 9")
    )
    problems = problems_of(text, "runs/plan.toml")
    expected = {
        "num_devices": "112*1*16*8 = 14336 ranks",
        "tp = 112": "tp=112 leaves some ranks without any of num_kv_heads=96",
        "zero = 9": "zero = 9 must be at most 3",
        "global": "global=1536 is no multiple of micro=5. Use global = 1535 or 1540",
        "mirco": "unknown key 'mirco' in [batch]; did you mean 'micro'?",
        "dtype": "did you mean 'bf16'?",
        "seed": "must be a whole number",
    }
    for needle, sentence in expected.items():
        start = f"runs/plan.toml:{line_of(text, needle)}: "
        assert any(problem.startswith(start) and sentence in problem for problem in problems), (needle, problems)
    assert any("unknown section [numeric]; did you mean 'numerics'?" in problem for problem in problems)
    lines = [int(problem.split(":")[1]) for problem in problems]
    assert lines == sorted(lines)


def test_a_key_in_the_wrong_section_is_reported_with_its_own():
    (problem,) = problems_of(GPT3.replace("[runtime]", "[runtime]\ntp = 8"))
    assert problem == "plan.toml:7: unknown key 'tp' in [runtime]; it belongs to [layout]."


def test_a_syntax_error_has_its_line():
    (problem,) = problems_of("[model]\npreset = = 3\n")
    assert problem.startswith("plan.toml:2: this is not TOML")


def test_a_key_outside_every_section_is_refused():
    (problem,) = problems_of("tp = 3\n" + GPT3)
    assert problem.startswith("plan.toml:1: 'tp' is a key outside every section")


def test_an_empty_file_says_what_is_missing():
    model, batch = problems_of("")
    assert "[model] lacks num_layers" in model and "model.preset" in model
    assert "[batch] lacks global, sequence" in batch


def test_lines_are_right_below_multi_line_values_and_comments():
    section = '[optimizer]\nbetas = [ # two\n  0.9,\n  0.95,\n]\nname = """\nadamx"""\n\n# a comment\n[runtime]'
    text = GPT3.replace("[runtime]", section).replace("zero = 1", "zero = -1")
    first, second = problems_of(text)
    assert first.startswith(f"plan.toml:{line_of(text, 'name = ' + chr(34) * 3)}: name = ")
    assert second.startswith(f"plan.toml:{line_of(text, 'zero')}: zero = -1 must be at least 0")


def test_a_dotted_key_is_a_table():
    text = GPT3.replace("[runtime]\n", "").replace('profile = "shardproof"', "peak_flops_per_s.bf16 = 1e15")
    assert dict(Plan.from_toml(text).cluster.peak_flops_per_s) == {"bf16": 1e15}


def test_a_preset_can_be_overridden_field_by_field_and_says_so():
    text = GPT3.replace("num_devices = 1024", "num_devices = 1024\nnode_network_bytes_per_s = 100e9")
    plan = Plan.from_toml(text.replace("[cluster]", "num_layers = 48\n[cluster]"))
    assert (plan.cluster.node_network_bytes_per_s, plan.cluster.sources["node_network_bytes_per_s"]) == (
        100e9,
        "set in the plan",
    )
    assert plan.cluster.device_memory_bytes == round(79.15 * 2**30)
    assert (plan.model.num_layers, plan.model.hidden_size) == (48, 12288)
    assert Plan.from_toml(plan.to_toml()) == plan


@pytest.mark.parametrize(
    ("written", "num_bytes"), [('"8%"', int(0.08 * round(79.15 * 2**30))), ("4e9", 4_000_000_000), ("1048576", 1048576)]
)
def test_headroom_is_written_as_a_text_or_a_number_and_is_kept(written, num_bytes):
    plan = Plan.from_toml(GPT3.replace("num_devices = 1024", f"num_devices = 1024\nheadroom = {written}"))
    assert plan.cluster.headroom_bytes == num_bytes
    assert Plan.from_toml(plan.to_toml()) == plan


def test_an_omitted_dp_is_what_the_devices_leave():
    assert Plan.from_toml(GPT3.replace("dp = 16\n", "")).layout.dp == 16
    (problem,) = problems_of(GPT3.replace("dp = 16\n", "").replace("1024", "1000"))
    assert "num_devices=1000 is no multiple of tp*cp*pp=64" in problem and "Use 960 devices" in problem


def test_omitted_devices_are_the_ranks_of_the_layout():
    assert Plan.from_toml(GPT3.replace("num_devices = 1024\n", "")).cluster.num_devices == 1024


def test_a_model_field_by_field_needs_only_what_has_no_default():
    model = "[model]\nnum_layers = 2\nhidden_size = 60\nffn_hidden_size = 90\nnum_heads = 6\nvocab_size = 256\n"
    plan = Plan.from_toml(model + "[batch]\nglobal = 4\nsequence = 32\n")
    assert (plan.model.num_kv_heads, plan.model.head_dim, plan.model.max_positions) == (6, 10, 32)
    assert plan.cluster.name == "this-host"


def test_a_cluster_file_starts_from_the_folder_of_the_plan(tmp_path):
    sources = '[cluster.sources]\nlink_efficiency = "measured today"\n'
    (tmp_path / "mine.toml").write_text('[cluster]\npreset = "dgx-h100"\nlink_efficiency = 0.9\n' + sources)
    text = GPT3.replace('preset = "dgx-a100-80g"', 'file = "mine.toml"')
    plan = Plan.from_toml(text, str(tmp_path / "plan.toml"))
    assert (plan.cluster.link_efficiency, plan.cluster.sources["link_efficiency"]) == (0.9, "measured today")
    assert Plan.from_toml(plan.to_toml()) == plan


def test_dp_follows_the_devices_of_a_cluster_file(tmp_path):
    (tmp_path / "mine.toml").write_text('[cluster]\npreset = "dgx-a100-80g"\nnum_devices = 128\n')
    text = GPT3.replace('preset = "dgx-a100-80g"\nnum_devices = 1024', 'file = "mine.toml"').replace("dp = 16\n", "")
    assert Plan.from_toml(text, str(tmp_path / "plan.toml")).layout.dp == 2


def test_a_cluster_file_cannot_name_another(tmp_path):
    (tmp_path / "mine.toml").write_text('[cluster]\npreset = "dgx-h100"\nfile = "mine.toml"\n')
    (problem,) = problems_of(GPT3.replace('preset = "dgx-a100-80g"', 'file = "mine.toml"'), str(tmp_path / "plan.toml"))
    assert problem == f"{tmp_path / 'mine.toml'}:3: a cluster file cannot name another one. Copy its keys."


def test_a_missing_cluster_file_is_the_only_problem():
    (problem,) = problems_of(GPT3.replace('preset = "dgx-a100-80g"', 'file = "nowhere.toml"'))
    assert problem == "plan.toml:4: nowhere.toml: No such file or directory."


def test_a_bad_degree_is_not_blamed_on_what_is_derived_from_it():
    (problem,) = problems_of(GPT3.replace("dp = 16\n", "").replace("tp = 8", 'tp = "8"'))
    assert problem.startswith("plan.toml:9: tp = '8' must be a whole number")


def test_problems_of_a_cluster_file_have_its_own_lines(tmp_path):
    (tmp_path / "mine.toml").write_text('[cluster]\npreset = "dgx-h100"\nlink_eficiency = 0.9\nmatmul_efficiency = 2\n')
    problems = problems_of(GPT3.replace('preset = "dgx-a100-80g"', 'file = "mine.toml"'), str(tmp_path / "plan.toml"))
    assert any(problem.startswith(f"{tmp_path / 'mine.toml'}:3: unknown key 'link_eficiency'") for problem in problems)
    assert any(
        problem.startswith(f"{tmp_path / 'mine.toml'}:4: matmul_efficiency = 2 must be at most 1")
        for problem in problems
    )


def cluster_file_problems(tmp_path, text) -> tuple[str, ...]:
    """What is said of a plan whose cluster file has this text, without the folder's name."""
    (tmp_path / "mine.toml").write_text(text)
    problems = problems_of(GPT3.replace('preset = "dgx-a100-80g"', 'file = "mine.toml"'), str(tmp_path / "plan.toml"))
    return tuple(problem.replace(f"{tmp_path}/", "") for problem in problems)


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("", "is empty"),
        ("# numbers will follow\n", "is empty"),
        ("[cluster]\n", "has no preset and no number of a device"),
        ('[cluster]\nname = "ours"\nnum_devices = 1024\n', "has no preset and no number of a device"),
    ],
)
def test_a_cluster_file_that_says_nothing_of_a_device_is_refused_with_how_to_make_one(tmp_path, text, lacks):
    (problem,) = cluster_file_problems(tmp_path, text)
    assert problem.startswith(f"mine.toml: this cluster file {lacks}. `shardproof calibrate -o ")
    assert "mine.toml` measures this machine and writes it" in problem


def test_a_cluster_file_of_counts_alone_completes_a_plan_that_says_what_a_device_is(tmp_path):
    (tmp_path / "mine.toml").write_text("[cluster]\nnum_devices = 1024\n")
    text = GPT3.replace("num_devices = 1024", 'file = "mine.toml"')
    assert Plan.from_toml(text, str(tmp_path / "plan.toml")) == Plan.from_toml(GPT3)


def test_all_unknown_sections_and_keys_of_a_cluster_file_are_reported_together_in_file_order(tmp_path):
    text = '[clusters]\npreset = "dgx-h100"\n[cluster]\nlink_eficiency = 0.9\npreste = "dgx-h100"\n[layout]\ntp = 2\n'
    assert cluster_file_problems(tmp_path, text) == (
        "mine.toml:2: unknown section [clusters]; did you mean 'cluster'? Known: cluster.",
        "mine.toml:4: unknown key 'link_eficiency' in [cluster]; did you mean 'link_efficiency'?",
        "mine.toml:5: unknown key 'preste' in [cluster]; did you mean 'preset'?",
        "mine.toml:7: unknown section [layout]. Known: cluster.",
    )


def test_a_cluster_file_of_unknown_sections_alone_is_not_this_host(tmp_path):
    unknown, nothing = cluster_file_problems(tmp_path, '[clusters]\npreset = "dgx-h100"\n')
    assert unknown.startswith("mine.toml:2: unknown section [clusters]")
    assert nothing.startswith("mine.toml: this cluster file has no [cluster] section. `shardproof calibrate -o ")


def test_a_missing_config_file_is_named_with_the_line_that_names_it():
    (problem,) = problems_of(GPT3.replace('preset = "gpt3-175b"', 'config = "nowhere/config.json"'))
    assert problem == "plan.toml:2: nowhere/config.json: No such file or directory."


def test_two_descriptions_of_a_model_are_refused():
    (problem,) = problems_of(GPT3.replace("[cluster]", 'config = "config.json"\n[cluster]'))
    assert "model.preset and model.config both describe a model" in problem


BATCH_TO_NAME, ODD = GPT3[GPT3.index("global") : GPT3.index("[numerics]")], "InterleavedZeroBubble"
CLUSTER_TO_MODE = GPT3[GPT3.index("[cluster]") : GPT3.index("[train]")]
EXPERTS = "num_experts = 8\nexperts_per_token = 2\n" + CLUSTER_TO_MODE.replace("fast", "exact")
LONG_BLOCKS = EXPERTS.replace("ep = 1\n", "ep = 1\netp = 1\n") + "gradient_token_block = 512\n"
UNEQUAL = EXPERTS.replace("ep = 1\n", "ep = 2\n").replace("global = 1536", "global = 1500").replace("exact", "fast")
CONTEXT_TO_MODE = GPT3[GPT3.index("cp = 1") : GPT3.index("[train]")]
EXACT = CONTEXT_TO_MODE.replace("cp = 1", "cp = 2").replace("fast", "exact")
BROKEN = {
    "actions-are-bounded": (("global = 1536", "global = 1073741824"), "actions, more than the 1,000,000"),
    "heads-admit-tp": (("tp = 8", "tp = 128"), "tp=128 leaves some ranks without any of num_kv_heads=96"),
    "leaves-admit-tp": (
        ('mode = "fast"', 'mode = "fast"\nffn_block = 16384'),
        ("Use tp <= 3 or numerics.ffn_block <= 6144"),
    ),
    "microbatches-divide": (
        ("global = 1536", "global = 12"),
        ("12 microbatches of micro=1 for dp=16 ranks. Use global >= 16, or dp <= 12"),
    ),
    "experts-see-equal-microbatches": ((CLUSTER_TO_MODE, UNEQUAL), "others 93 microbatches. Use global = 1488 or 1504"),
    "stages-hold-all-layers": (("pp = 8", "pp = 5"), "pp*vpp=5 does not divide num_layers=96"),
    "interleaving-matches": (("vpp = 1", "vpp = 2"), 'Set schedule.name = "Interleaved1F1B" or layout.vpp = 1'),
    "schedule-can-be-built": (
        (BATCH_TO_NAME, BATCH_TO_NAME.replace("1536", "2480").replace("1F1B", ODD)),
        "Use 152 or 160",
    ),
    "torch-shards-by-itself": (
        ("[batch]", '[data_parallel]\nlibrary = "torch"\n[batch]'),
        ("zero=1 keeps them whole on every rank"),
    ),
    "stages-are-sharded": (
        ('name = "1F1B"', 'name = "1F1B"\nmax_active_stages = 2'),
        ("Set layout.zero = 3, or leave max_active_stages"),
    ),
    "batches-are-waited-for": (
        ("[runtime]", "[runtime]\np2p_batched = false"),
        ("p2p_overlap=false is not set. Set it, or leave"),
    ),
    "padding-is-distinguished": (
        ("steps = 20", "steps = 20\npadded = true"),
        "padded=true fills sequences up with ignore_token, which is not",
    ),
    "data-are-split-once": (
        ("steps = 20", 'steps = 20\nsplit = "90,10"\nvalidation_data = "held_out.txt"'),
        "cuts validation data off, and validation_data names others",
    ),
    "weights-are-positive": (
        ("steps = 20", 'steps = 20\nvalidation_data = "0 a 1 b"'),
        "validation_data has a with weight 0",
    ),
    "name-or-file": (('name = "1F1B"', 'name = "GPipe"\nfile = "x.csv"'), "both choose a schedule"),
    "positions-suffice": (
        ("sequence = 2048", "sequence = 4096"),
        ("sequence=4096 is longer than the learned position table"),
    ),
    "cluster-is-filled": (("dp = 16", "dp = 8"), "512 ranks, but num_devices=1024. Use dp=16"),
    "nodes-are-whole": (
        ("num_devices = 1024", "num_devices = 1020"),
        ("does not fill nodes of devices_per_node=8. Use 1016 or 1024"),
    ),
    "token-blocks-admit-tp": (
        ('mode = "fast"', ('mode = "exact"\nreduction_token_block = 512')),
        "reduction_token_block <= 256",
    ),
    "sequence-divides": (("sequence = 2048", "sequence = 2044"), "Use sequence=2040"),
    "experts-divide": (
        ("ep = 1", "ep = 2"),
        ("ep=2 spreads experts, but model gpt3-175b has none (num_experts=0). Use ep=1"),
    ),
    "experts-see-whole-blocks": ((CLUSTER_TO_MODE, LONG_BLOCKS), "tp divides, or numerics.gradient_token_block = 256"),
    "expert-leaves-admit-etp": (
        (CLUSTER_TO_MODE, EXPERTS.replace("ep = 1\n", "ep = 1\netp = 32\n")),
        "etp=32 cuts expert_ffn_hidden_size=49152 inside a leaf of 2048: there are only 24 leaves",
    ),
    "token-blocks-admit-cp": (
        (CONTEXT_TO_MODE, EXACT + "gradient_token_block = 96\n"),
        "cp=2 cuts sequence=2048 into chunks of 512 tokens, inside a block of gradient_token_block=96, whose sums "
        "exact numerics keep "
        "whole. Use gradient_token_block among [1, 2, 4, 8, 16, 32, 64]",
    ),
    "heads-admit-cp-inner": (
        ("cp = 1", "cp = 8\ncp_inner = 8"),
        "num_kv_heads=96 leave a tensor-parallel rank (tp=8) 12 of them, which 8 ranks cannot share evenly. Use "
        "cp_inner among 1, 2, 4",
    ),
    "routers-exist": (
        ("steps = 20", "steps = 20\nrouter_z_loss = 0.001"),
        ("router_z_loss=0.001 is for routers, but model gpt3-175b"),
    ),
    "recompute-is-chosen-once": (
        ('"selective"', '"selective"\nnum_layers = 2'),
        ('Set recompute.mode = "full", or leave num_layers out'),
    ),
    "distributed-inputs-are-whole": (
        ('"selective"', '"full"\ndistribute = true'),
        "layout.sequence_parallel=true each holds its own tokens only. Leave one of the two out",
    ),
    "recomputed-layers-exist": (
        ('"selective"', '"full"\nlayers = [0, 96]'),
        "model gpt3-175b has the layers 0 to 95, and no layer 96",
    ),
    "recomputed-modules-exist": (
        ('"selective"', ('"selective"\nmodules = ["core_attn", "moe"]')),
        "has no experts, so there is no 'moe'",
    ),
    "offloaded-layers-exist": (
        ("[numerics]", "[offload]\nactivations = 97\n[numerics]"),
        "model gpt3-175b has 96. Use at most 96",
    ),
    "offloaded-masters-exist": (
        ("[numerics]", "[offload]\nmasters = true\n[numerics]"),
        "optimizer=0 keeps all moments on the device. Set offload.optimizer=1.0, or leave masters out",
    ),
    "offloaded-moments-exist": (
        ("[numerics]", '[offload]\noptimizer = 1.0\n[optimizer]\nname = "sgd"\nmomentum = 0.0\n[numerics]'),
        "SGD with momentum=0 has none. Leave offload.optimizer out",
    ),
    "groups-have-parameters": (
        ("[numerics]", '[optimizer]\ngroups = [{ match = "layers.0.mlp.up.wieght" }]\n[numerics]'),
        "which matches the whole name of no parameter; did you mean 'layers.0.mlp.up.weight'?",
    ),
    "shards-divide": (
        ("[numerics]", "[data_parallel]\nshard = 3\n[numerics]"),
        ("shard=3 does not divide the dp*cp=16 ranks"),
    ),
    "checkpoints-have-a-folder": (
        ("[numerics]", "[checkpoint]\nkeep = 3\n[numerics]"),
        "keep=3 is about checkpoints, but there is no folder for them. Set checkpoint.folder",
    ),
    "batches-are-listed": (
        ("global = 1536", "rampup = [30, 7, 1000000]\nglobal = 1536"),
        "does not reach global=1536 from 30 in increments of 7. Use global = 1535 or 1542",
    ),
    "rates-are-ordered": (
        ("[numerics]", '[optimizer]\nschedule = "linear"\nwarmup_steps = 20\n[numerics]'),
        "warmup_steps=20 is not below the length of the run (train.steps=20)",
    ),
    "axes-are-known": (
        ("[numerics]", "[communicators]\nmax_ctas = { pt = 4 }\n[numerics]"),
        "max_ctas names \"pt\", which no communicators join; did you mean 'tp'?",
    ),
    "ctas-are-whole": (
        ("[numerics]", "[communicators]\ncga_cluster_size = { dp = 2.5 }\n[numerics]"),
        "cga_cluster_size: dp = 2.5 is no number of thread blocks. Use 2",
    ),
    "most-ctas-are-no-fewer": (
        ("[numerics]", "[communicators]\nmin_ctas = { tp = 8 }\nmax_ctas = { tp = 4 }\n[numerics]"),
        "max_ctas: tp = 4 is fewer than min_ctas: tp = 8. Use min_ctas of at most 4",
    ),
    "windows-are-registered": (
        ("[numerics]", "[communicators]\nsymmetric = true\n[numerics]"),
        'there are none. Set registered=["dp"], or leave it out',
    ),
    "loss-scales-are-powers-of-two": (
        ('dtype = "bf16"', ('dtype = "fp16"\nloss_scale = 1000.0')),
        "is no power of two. Use 1024",
    ),
    "scalings-are-modelled": (
        ('dtype = "bf16"', 'dtype = "bf16"\nscaling = "row"'),
        ('scaling="row" is about operands of 8 bits'),
    ),
    "dtype-has-peak": (
        ('"bf16"', '"fp8"'),
        ("has no peak rate on cluster dgx-a100-80g. Use one of bf16, fp16, fp32, tf32"),
    ),
    "stragglers-exist": (
        ("[numerics]", "[variation]\nstragglers = { node-128 = 1.5 }\n[numerics]"),
        "'node-128' is not among the 128 nodes of the cluster",
    ),
    "classes-are-known": (
        ("[numerics]", '[variation]\ndevice_classes = { dgx-h10 = "node-0" }\n[numerics]'),
        "'dgx-h10' is no cluster preset; did you mean 'dgx-h100'?",
    ),
    "links-exist": (
        ("[numerics]", '[variation]\nfailed_links = "card-3-1, node-4"\n[numerics]'),
        "cuts nodes off. Use slow_links={node-4 = 0.5}",
    ),
    "hiccups-have-a-length": (
        ("[numerics]", "[variation]\nhiccup_s = 2.0\n[numerics]"),
        "hiccups_per_s=0 and hiccup_s=2: pauses need both",
    ),
    "imbalance-needs-experts": (
        ("[numerics]", "[variation]\nexpert_imbalance = 0.5\n[numerics]"),
        "is about experts, but model gpt3-175b has none",
    ),
    "products-are-named-once": (
        ("[numerics]", '[numerics]\ntriton_products = ["none", "project"]'),
        "has 'none' among others. Give ['none'], or the others alone.",
    ),
    "checkpoints-need-failures": (
        ("[numerics]", "[variation]\nrestart_s = 60.0\n[numerics]"),
        "Give device_mtbf_s, or leave restart_s out",
    ),
}


OF_ONE_MODEL = [rule for rule in RULES if "modules" not in rule.sections]
"""Those of [[modules]] are in test_modules.py."""


def test_hybrid_sharding_of_experts_that_leaves_a_part_over_is_refused():
    model = ModelSpec("m", 2, 40, 80, 10, 10, 4, 320, 64, num_experts=4, experts_per_token=2)
    layout = Layout(tp=5, dp=2, etp=2, zero=1)  # five ranks have copies of an expert
    batch, cluster = Batch(4, 1, 32), cluster_preset("this-host", 10)
    with pytest.raises(PlanError, match=r"leaves experts groups of 2 ranks, which do not divide the 5 .* among \[2\]"):
        Plan(model, cluster, layout, batch, data_parallel=DataParallel(shard=1))
    assert num_shards(Plan(model, cluster, layout, batch, data_parallel=DataParallel(shard=2)), 0) == (2, 5)


@pytest.mark.parametrize("rule", OF_ONE_MODEL, ids=lambda rule: rule.name)
def test_each_rule_catches_its_minimal_failing_plan_on_a_line_of_its_keys(rule):
    (before, after), sentence = BROKEN[rule.name]
    text = GPT3.replace(before, after)
    (problem,) = [problem for problem in problems_of(text) if sentence in problem]
    line = text.splitlines()[int(problem.split(":")[1]) - 1]
    assert line.split(" = ")[0] in [key.partition(".")[2] for key in rule.keys]


MIXTURE = """\
[model]
preset = "deepseek-v2-lite"
[cluster]
preset = "dgx-h100"
[layout]
tp = 4
dp = 4
ep = 8
etp = 2
sequence_parallel = true
[batch]
global = 16
sequence = 4096
"""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("ep = 8", "ep = 3"), "etp*ep=6 does not divide tp*cp*dp=16"),
        (("dp = 4\nep = 8\netp = 2", "dp = 12\nep = 48\netp = 1"), "ep=48 does not divide num_experts=64"),
        (
            ("tp = 4\ndp = 4\nep = 8\netp = 2", "tp = 4\ndp = 3\nep = 4\netp = 3"),
            ("etp=3 does not divide expert_ffn_hidden_size=1408"),
        ),
        (("etp = 2", "etp = 2\npp = 3\norder = 'tp-pp-cp-ep-dp'"), "puts pp before axes that experts cut otherwise"),
        (("sequence_parallel = true", ""), None),
        (("dp = 4\n", "cp = 2\ndp = 2\n"), None),
        (("dp = 4\n", "cp = 2\ndp = 2\nstages = 'Et*27L'\n"), None),
        (
            ("dp = 4\n", "cp = 2\ndp = 2\nstages = 'Et*27mL'\n"),
            ("names 1 modules of multi-token prediction (m), but model deepseek-v2-lite"),
        ),
        (('preset = "deepseek-v2-lite"', "preset = 'deepseek-v2-lite'\nnum_mtp_layers = 2"), None),
        (("sequence = 4096", "sequence = 4095"), "sequence_parallel=true cuts sequence=4095 over tp=4"),
        (("dp = 4", "cp = 4\ndp = 1"), None),
        (("dp = 4\n", "cp = 4\ndp = 1\nzero = 1\n"), None),
        (
            ("[batch]", "[data_parallel]\nshard = 2\n[batch]"),
            ("zero=0 shards nothing. Set layout.zero, or leave shard out"),
        ),
        (("[batch]", "[data_parallel]\noverlap_param_gather = true\n[batch]"), "zero=0 shards nothing"),
        (
            (
                "[batch]",
                ("[recompute]\nmode = 'selective'\nmodules = ['mla_up_proj', 'moe_act', 'shared_experts']\n[batch]"),
            ),
            None,
        ),
        (
            ("[batch]", "[recompute]\nmode = 'full'\nmodules = ['moe']\n[batch]"),
            ('Set recompute.mode = "selective", or leave modules out'),
        ),
        (("[batch]", "[recompute]\nmode = 'selective'\nmodules = ['mpl']\n[batch]"), "'mpl' is not one of core_attn"),
        (
            ('preset = "deepseek', 'experts_per_token = 65\npreset = "deepseek'),
            ("experts_per_token=65 must be 1 to num_experts=64"),
        ),
    ],
)
def test_rules_of_experts_and_context_give_the_numbers_and_a_way_out(change, sentence):
    text = MIXTURE.replace(*change)
    assert text != MIXTURE
    if sentence is None:
        assert Plan.from_toml(Plan.from_toml(text).to_toml()) == Plan.from_toml(text)
    else:
        assert any(sentence in problem for problem in problems_of(text)), problems_of(text)


def test_context_parallelism_needs_two_chunks_a_rank_and_sequence_parallelism_cuts_what_it_leaves():
    text = MIXTURE.replace("dp = 4", "cp = 4\ndp = 1")
    assert (
        "2*cp=8 chunks in all, which do not divide sequence=4092. Use sequence=4088"
        in problems_of(text.replace("4096", "4092"))[0]
    )
    (problem,) = problems_of(text.replace("4096", "4088"))
    assert "cuts the 1022 tokens that cp=4 leaves over tp=4, which does not divide it. Use sequence=4080" in problem


def test_a_latent_model_field_by_field_derives_the_width_of_its_heads():
    model = (
        "[model]\nnum_layers = 2\nhidden_size = 64\nffn_hidden_size = 90\nnum_heads = 6\nvocab_size = "
        "256\nkv_lora_rank = 16\n"
    )
    plan = Plan.from_toml(
        model + ("qk_nope_head_dim = 12\nqk_rope_head_dim = 4\nv_head_dim = 8\n[batch]\nglobal = 4\nsequence = 32\n")
    )
    assert (plan.model.head_dim, plan.model.num_kv_heads, plan.model.value_head_dim) == (16, 6, 8)
    assert "num_experts" not in plan.to_toml() and Plan.from_toml(plan.to_toml()) == plan


def test_a_field_that_a_preset_has_and_the_plan_drops_is_written_out():
    model = dataclasses.replace(model_preset("qwen3-30b-a3b"), expert_ffn_hidden_size=None)
    plan = Plan(model, cluster_preset("this-host", 1), Layout(), Batch(1, 1, 16))
    assert "preset" not in plan.to_toml().partition("[cluster]")[0]
    assert Plan.from_toml(plan.to_toml()) == plan


def test_every_rule_names_keys_that_exist():
    known = {key.dotted for key in (*KEYS, *MODULE_KEYS)}
    assert {key for rule in RULES for key in rule.keys} <= known
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert len(OF_ONE_MODEL) == len(BROKEN)


def test_interleaving_without_chunks_is_refused():
    (problem,) = problems_of(GPT3.replace('"1F1B"', '"Interleaved1F1B"'))
    assert "needs vpp of at least 2, but vpp=1" in problem


@pytest.mark.parametrize("vpp", [1, 3])
def test_a_vee_needs_exactly_two_stages_per_rank(vpp):
    text = GPT3.replace('"1F1B"', '"ZBVZeroBubble"').replace("vpp = 1", f"vpp = {vpp}")
    (problem,) = (problem for problem in problems_of(text) if "vpp" in problem and "needs" in problem)
    assert f"needs vpp of 2, but vpp={vpp}. Set layout.vpp = 2 or" in problem


def test_a_plan_made_in_python_is_held_to_the_same_rules():
    with pytest.raises(PlanError) as caught:
        Plan(model_preset("tiny-gpt"), cluster_preset("this-host", 7), Layout(tp=5, dp=2), Batch(5, 2, 256))
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.dotted)
def test_each_key_refuses_a_value_of_the_wrong_type_on_its_line(key):
    wrong = {
        "int": "1.5",
        "float": '"fast"',
        "bool": "1",
        "size": "8",
        "two floats": "[0.9]",
        "list of ints": "[0, 1.5]",
        "list of texts": '["x"]',
        "table of rates": "{ bf16 = -1 }",
    }
    text = f"[{key.section}]\n{key.name} = {wrong.get(key.type, '3')}\n"
    assert any(problem.startswith(f"plan.toml:2: {key.name} = ") for problem in problems_of(text))


@pytest.mark.parametrize(
    "key", [key for key in KEYS if key.minimum is not None or key.above is not None], ids=lambda key: key.dotted
)
def test_each_bounded_key_refuses_a_value_below_its_bound(key):
    value = {"int": "-1", "float": "-1.0", "two floats": "[-1.0, 0.5]", "list of ints": "[1, -1]"}[key.type]
    assert any(
        problem.startswith(f"plan.toml:2: {key.name} = ")
        for problem in problems_of(f"[{key.section}]\n{key.name} = {value}\n")
    )


def test_the_key_table_fills_every_field_of_every_noun():
    for section, noun in NOUNS.items():
        attributes = [key.attribute for key in KEYS if key.section == section and key.attribute is not None]
        assert sorted(attributes) == sorted(field.name for field in dataclasses.fields(noun)), section
    assert {field.name for field in dataclasses.fields(Plan)} == set(NOUNS)


def test_key_defaults_are_those_of_the_nouns():
    defaults = {key.dotted: key.default for key in KEYS}
    assert (defaults["layout.tp"], defaults["precision.dtype"], defaults["optimizer.betas"]) == (1, "bf16", (0.9, 0.95))
    assert {key.name for key in KEYS if key.section == "batch" and key.required} == {"global", "sequence"}


def test_every_preset_is_a_model_a_plan_can_name():
    for name in MODEL_PRESETS:
        plan = Plan.from_toml(f'[model]\npreset = "{name}"\n[batch]\nglobal = 1\nsequence = 16\n')
        assert plan.model.name == name


NUMBERS = ["0", "-1", "1", "3", "99999999", "1.5", "1e400", "nan"]
TEXTS = ['""', '"x"', '"1F1B"', '"tp"', '"((("', '"Et*3L"']
TOML_VALUES = st.sampled_from([*NUMBERS, *TEXTS, "true", "[1, 2]", "{}", "1979-05-27"])


@given(st.dictionaries(st.sampled_from(KEYS), TOML_VALUES, max_size=4))
def test_whatever_values_keys_get_the_answer_is_a_plan_or_located_problems(changes):
    lines = GPT3.splitlines()
    for key, value in changes.items():
        header = f"[{key.section}]"
        if header not in lines:
            lines.append(header)
        lines = [line for line in lines if not line.startswith(f"{key.name} = ")]
        lines.insert(lines.index(header) + 1, f"{key.name} = {value}")
    try:
        plan = Plan.from_toml("\n".join(lines))
    except PlanError as error:
        assert all(problem.startswith("plan.toml:") for problem in error.problems)
    else:
        assert Plan.from_toml(plan.to_toml()) == plan


def test_the_rules_are_asked_once_about_a_plan_that_is_read(monkeypatch):
    asked = []

    def counted(sections):
        asked.append(sections)
        return broken_rules(sections)

    for module in (plan_module, build_module):
        monkeypatch.setattr(module, "broken_rules", counted)
    plan = Plan.from_toml(GPT3)
    assert len(asked) == 1
    assert asked[0].keys() == {entry.name for entry in dataclasses.fields(Plan)}
    assert dataclasses.replace(plan, train=plan.train) == plan and len(asked) == 2
