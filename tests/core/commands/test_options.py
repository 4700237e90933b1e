"""Options: plans from options alone, on top of a file, and search spaces; output to the terminal, JSON and files."""

import argparse
import json

import pytest

from shardproof.core.base.errors import FileError, PlanError
from shardproof.core.base.files import write_text
from shardproof.core.commands.options import (
    add_output,
    add_plan,
    emit,
    read_plan,
    read_search_space,
)
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, DataParallel

PLAN = """\
[model]
preset = "tiny-gpt"
[layout]
tp = 2
pp = 2
dp = 2
[batch]
global = 8
micro = 2
sequence = 32
[precision]
dtype = "fp32"
"""

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_plan(parser)
    add_output(parser)
    return parser.parse_args(line.split())


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def test_the_option_only_search_of_the_interface():
    space = read_search_space(
        parse("--model llama3-70b --cluster dgx-h100 --devices 512 --global-batch 1024 --sequence 8192")
    )
    assert space.model == model_preset("llama3-70b")
    assert space.cluster == cluster_preset("dgx-h100", 512)
    assert space.batch == Batch(1024, 1, 8192)
    assert space.pinned == {}


def test_the_option_only_fit_of_the_interface_derives_dp_and_fills_the_batch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plan = read_plan(parse(f"--model {tmp_path}/config.json --devices 8 --tp 4 --pp 2"))
    assert plan.layout == Layout(tp=4, pp=2, dp=1)
    assert plan.cluster.name == "this-host" and plan.cluster.num_devices == 8
    assert plan.batch == Batch(8, 1, 128)
    assert plan.num_microbatches == 4 * plan.layout.pp


def test_dp_is_what_the_devices_leave():
    assert read_plan(parse("--model tiny-gpt --devices 12 --tp 2 --pp 2")).layout.dp == 3


@pytest.mark.parametrize("degrees", ["--tp 8", "--pp 8", "--tp 4 --pp 4", "--vpp 2"])
def test_a_world_of_4_refuses_what_megatron_refuses(degrees):
    with pytest.raises(PlanError):
        read_plan(parse(f"--model tiny-gpt --devices 4 {degrees}"))


def test_without_devices_there_are_as_many_as_ranks():
    assert read_plan(parse("--model tiny-gpt-6h --tp 3 --dp 5")).cluster.num_devices == 15


def test_vpp_alone_chooses_the_interleaved_schedule():
    assert read_plan(parse("--model tiny-gpt --pp 2 --vpp 2")).schedule.name == "Interleaved1F1B"
    gathering = read_plan(parse("--model tiny-gpt --pp 2 --vpp 2 --zero 3 --set schedule.max_active_stages=1")).schedule
    assert (gathering.name, gathering.max_active_stages) == ("Interleaved1F1B", 1)


def test_the_default_sequence_stops_at_8192_tokens():
    assert read_plan(parse("--model llama3.1-405b --tp 8 --pp 6 --cluster dgx-h100")).batch.sequence == 8192


def test_a_file_alone_is_read_as_it_is(plan_file):
    assert read_plan(parse(str(plan_file))) == Plan.from_toml(PLAN)


def test_options_override_the_file_and_dp_follows_a_new_tp(plan_file):
    plan = read_plan(
        parse(
            f"{plan_file} --tp 4 --devices 16 --dtype bf16 --set optimizer.clip_grad_norm=0.5 --set train.data=text.txt"
        )
    )
    assert plan.layout == Layout(tp=4, pp=2, dp=2)
    assert (plan.precision.dtype, plan.optimizer.clip_grad_norm, plan.train.data) == ("bf16", 0.5, "text.txt")
    assert plan.batch == Batch(8, 2, 32)


def test_an_option_replaces_the_other_way_to_say_the_same(plan_file, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_plan(parse(f"{plan_file} --model {tmp_path}/config.json")).model.gated
    assert read_plan(parse(f"{plan_file} --schedule x.csv --set schedule.file=y.csv")).schedule.file == "y.csv"


def test_the_boolean_option_has_a_negative_form(plan_file):
    assert read_plan(parse(f"{plan_file} --sequence-parallel")).layout.sequence_parallel
    assert not read_plan(parse(f"{plan_file} --no-sequence-parallel")).layout.sequence_parallel


def test_problems_name_the_option_they_came_from(plan_file):
    with pytest.raises(PlanError) as caught:
        read_plan(parse(f"{plan_file} --tp 5 --dtype bf17 --set layout.foo=1 --set layot.tp=2"))
    problems = "\n".join(caught.value.problems)
    for expected in (
        "--tp: tp=5 leaves some ranks without any of num_kv_heads=4",
        "--dtype: dtype = 'bf17' is not one of fp32, bf16, fp16, fp8; did you mean 'bf16'?",
        "--set layout.foo: unknown key 'foo' in [layout]",
        "--set layot.tp: unknown section [layot]; did you mean 'layout'?",
    ):
        assert expected in problems


def test_variables_are_of_scripts_and_not_of_a_plan(plan_file):
    with pytest.raises(PlanError, match="--variable is about a script"):
        read_plan(parse(f"{plan_file} --variable TP=8"))


def test_no_plan_and_no_model_asks_for_one():
    with pytest.raises(PlanError, match="which model"):
        read_plan(parse("--devices 8"))


def test_a_wrong_model_name_is_the_only_problem_reported():
    with pytest.raises(PlanError) as caught:
        read_plan(parse("--model lama3-70b --devices 8"))
    (problem,) = caught.value.problems
    assert problem.startswith("--model: unknown model 'lama3-70b'; did you mean 'llama3-70b'?")


@pytest.mark.parametrize("assignment", ["layout.tp", "tp=4", "a.b.c=1", ".tp=1", "layout.=1"])
def test_set_wants_section_key_and_value(assignment):
    with pytest.raises(PlanError, match=r"write section\.key=value"):
        read_plan(parse(f"--model tiny-gpt --set {assignment}"))


def test_degrees_on_the_command_line_are_pinned_in_a_search(plan_file):
    space = read_search_space(
        parse(f"{plan_file} --devices 16 --tp 4 --micro-batch 1 --recompute full --set layout.zero=1")
    )
    assert space.pinned == {"layout.tp": 4, "layout.zero": 1, "batch.micro": 1, "recompute.mode": "full"}
    assert space.batch == Batch(8, 1, 32)
    assert space.precision.dtype == "fp32"


def test_the_devices_of_a_search_may_come_from_a_cluster_file(tmp_path):
    (tmp_path / "mine.toml").write_text('[cluster]\npreset = "dgx-h100"\nnum_devices = 32\n')
    assert (
        read_search_space(
            parse(f"--model llama3-8b --cluster {tmp_path}/mine.toml --global-batch 64")
        ).cluster.num_devices
        == 32
    )


def test_a_search_reports_all_that_is_missing_or_wrong_with_pinned_values():
    with pytest.raises(PlanError) as caught:
        read_search_space(parse("--model tiny-gpt --zero 7"))
    problems = "\n".join(caught.value.problems)
    assert (
        "Give --devices" in problems and "zero = 7 must be at most 3" in problems and "Give --global-batch" in problems
    )
    assert len(caught.value.problems) == 3


def test_emit_prints_text_or_one_json_object(capsys):
    emit(parse(""), "two lines\nof text", {"answer": 42})
    assert capsys.readouterr().out == "two lines\nof text\n"
    emit(parse("--json"), "text", {"answer": 42})
    assert json.loads(capsys.readouterr().out) == {"answer": 42}


@pytest.mark.parametrize(("name", "content"), [("report.json", '{\n  "answer": 42\n}\n'), ("report.txt", "text\n")])
def test_emit_writes_the_kind_that_the_suffix_names(tmp_path, name, content, capsys):
    emit(parse(f"-o {tmp_path / name}"), "text", {"answer": 42})
    assert (tmp_path / name).read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert capsys.readouterr().out == "text\n"


def test_a_dash_is_standard_output(capsys):
    emit(parse("-o -"), "text", {})
    assert capsys.readouterr().out == "text\n"


def test_writing_replaces_a_file_and_leaves_nothing_behind_when_it_fails(tmp_path):
    target = tmp_path / "plan.toml"
    write_text(target, "first")
    write_text(target, "second")
    assert target.read_text() == "second"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_text(tmp_path / "folder", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "plan.toml"]


def test_a_file_that_cannot_be_written_is_named_as_the_user_named_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="this is a folder") as caught:
        write_text(tmp_path, "text")
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(FileError, match="the name of a file is empty"):
        write_text("", "text")


def test_emit_refuses_a_kind_it_does_not_write(tmp_path):
    with pytest.raises(PlanError, match=r"report.svg: .* writes \.json or \.txt"):
        emit(parse(f"-o {tmp_path / 'report.svg'}"), "text", {})
    assert not list(tmp_path.iterdir())


def test_a_plan_may_start_with_the_byte_order_mark_that_some_editors_write(plan_file):
    plain = read_plan(parse(str(plan_file)))
    plan_file.write_bytes(b"\xef\xbb\xbf" + plan_file.read_bytes())
    assert read_plan(parse(str(plan_file))) == plain


def test_a_cluster_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"cluster\.toml: this is not a text file"):
        read_plan(parse(f"--model tiny-gpt --cluster {path}"))


def test_an_empty_cluster_file_of_an_option_is_refused_with_all_other_problems(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text("")
    with pytest.raises(PlanError) as caught:
        read_plan(parse(f"--model tiny-gpt --cluster {path} --zero 7"))
    zero, cluster = sorted(caught.value.problems)
    assert zero.startswith("--zero: zero = 7")
    assert cluster.startswith(f"{path}: this cluster file is empty. `shardproof calibrate -o {path}` measures")


def test_experts_context_and_the_software_stack_can_be_chosen_by_options():
    line = (
        "--model mixtral-8x7b --cluster dgx-h100 --devices 32 --tp 2 --cp 2 --pp 2 --ep 4 --etp 1 "
        "--sequence-parallel --zero 1"
    )
    plan = read_plan(parse(f"{line} --profile megatron-te --set data_parallel.overlap_grad_reduce=false"))
    assert plan.layout == Layout(tp=2, cp=2, pp=2, dp=4, ep=4, etp=1, sequence_parallel=True, zero=1)
    assert (plan.runtime.profile, plan.data_parallel.overlap_grad_reduce) == ("megatron-te", False)


def test_a_search_keeps_what_a_plan_says_about_data_parallelism(plan_file):
    plan_file.write_text(f"{PLAN}[data_parallel]\nbucket_bytes = 1000000\n")
    assert read_search_space(parse(f"{plan_file} --devices 8")).data_parallel == DataParallel(bucket_bytes=1_000_000)
