"""Checkpoints: a resumed run has the bits of an undisturbed one under any layout, and however a save ends,
the last one is whole."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof import Trainer
from shardproof.backend.base.libraries import CHECKPOINTS
from shardproof.backend.base.observe import Observer
from shardproof.backend.checkpoint import again
from shardproof.backend.checkpoint.resume import Saved, path_of, problem_of, resumption, saved_in
from shardproof.backend.checkpoint.saver import Checkpoints
from shardproof.backend.checkpoint.tensors import Piece
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.dcp.index import INDEX_FILE
from shardproof.backend.launching.launch import Workers, preload
from shardproof.backend.trainer import TrainJob, train_rank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import PlanError, RankFailure
from shardproof.core.commands.cli import main
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.recorded_numerics import PRODUCTS
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.parameters import expert_biases, parameters
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.parameter_groups import ParameterGroup
from shardproof.core.plan.plan import Plan, recorded_numerics
from shardproof.core.plan.runtime import Offload, Recompute
from shardproof.core.plan.sections import Batch, DataParallel, Numerics, Precision, ScheduleChoice
from shardproof.core.plan.train import Checkpoint, Train

STEPS, SAVED = 3, 1
"""Of an undisturbed run, and after how many of them it is interrupted."""

DENSE = replace(
    model_preset("tiny-gpt"), num_layers=2, hidden_size=16, ffn_hidden_size=32, head_dim=4, hidden_dropout=0.1
)
"""With biases, learned positions, a tied table, and dropout, whose random numbers depend on the step."""
EXPERTS = ModelSpec(
    "moe", 2, 24, 48, 6, 6, 4, 256, 64, num_experts=6, experts_per_token=2, expert_ffn_hidden_size=12, expert_bias=True
)


def tiny(
    folder: Path | None = None, layout: Layout | None = None, *, model: ModelSpec = DENSE, micro: int = 2, **options
) -> Plan:
    """A problem that every layout here solves; clipping is active from the first step, and biases of experts move."""
    block, sequence = (3, 12) if model.is_moe else (2, 8)
    routers = {"router_jitter": 0.1, "expert_bias_rate": 0.01} if model.is_moe else {}
    defaults = {"steps": STEPS, "gradient_token_block": block, "reduction_token_block": block, **routers}
    if folder is not None:
        defaults["folder"] = str(folder)
    return training_plan(layout, model=model, samples=6, micro=micro, sequence=sequence, **{**defaults, **options})


class LastState(Observer):
    """An observer that keeps what the last step left of every tensor, by the names of a checkpoint."""

    def __init__(self, pieces: list):
        self.pieces = pieces

    def begin_step(self, step):
        self.pieces.clear()

    def optimizer_state(self, name, slices, moments):
        self.pieces += [(f"optimizer.{name}.{moment}", slices, each.clone()) for moment, each in moments.items()]

    def weight(self, name, slices, tensor, *, step=None):
        self.pieces.append((name, slices, tensor.clone()))


def train(plan: Plan, resume: Path | None = None, observer: Callable | None = None):
    """`RankResult.steps` of a run in this process."""
    job = TrainJob(plan, validate=False, observer=observer, resume=None if resume is None else str(resume))
    return run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), train_rank, job)[0].steps


@pytest.fixture(scope="module")
def undisturbed():
    """`undisturbed(plan)`: the steps of the same problem on one device without a checkpoint, and
    every tensor it ends with."""
    known = {}

    def run(plan: Plan):
        key = plan.model, plan.precision, plan.train, plan.optimizer
        if key not in known:
            one = replace(plan, layout=Layout(), cluster=cluster_preset("this-host", 1), checkpoint=Checkpoint())
            one = replace(
                one,
                offload=Offload(),
                schedule=ScheduleChoice("1F1B"),
                batch=replace(plan.batch, micro_size=1),
                recompute=Recompute(),
            )
            pieces: list = []
            steps = train(one, observer=lambda global_rank: LastState(pieces))
            known[key] = steps, {name: tensor for name, _, tensor in pieces}
        return known[key]

    return run


def shapes_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    """What a checkpoint of a plan holds."""
    weights = {each.name: each.shape for each in parameters(plan.model)}
    updates = {each.name: plan.optimizer.update_of(each) for each in parameters(plan.model)}
    moments = {
        f"optimizer.{name}.{moment}": weights[name] for name, update in updates.items() for moment in update.states
    }
    biases = {each.name: each.shape for each in expert_biases(plan.model)}
    scale = {"loss_scale": (3,)} if plan.precision.dtype == "fp16" else {}
    counts = {f"optimizer.{name}.step": () for name, update in updates.items() if update.is_counted}
    return {**weights, **biases, **moments, **counts, **scale}


def read_with_torch(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint, by DCP's own load with its own planner."""
    state = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def assert_same_end(path: Path, plan: Plan, state: dict[str, Tensor]) -> None:
    """A checkpoint has the bits that an undisturbed run ends with, nothing less and nothing more."""
    saved = read_with_torch(path, shapes_of(plan))
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata.keys()
    assert names == saved.keys() and state.keys() == {
        name for name in names if not name.endswith((".step", "loss_scale"))
    }
    different = [
        name
        for name, tensor in state.items()
        if not torch.equal(saved[name].view(torch.int32), tensor.view(torch.int32))
    ]
    assert not different
    assert all(float(tensor) == STEPS for name, tensor in saved.items() if name.endswith(".step"))


def numbers(steps) -> list:
    return [(step.step, step.loss, step.grad_norm, step.aux_loss, step.loss_scale) for step in steps]


DEEP = replace(DENSE, num_layers=4)
BF16 = {"precision": Precision("bf16")}
FP16 = {"precision": Precision("fp16", initial_loss_scale=1024.0, loss_scale_window=2)}
SGD = {"optimizer": Optimizer(name="sgd", nesterov=True)}
CHANGES = {
    "one-to-tp2-pp2": (tiny(), tiny(layout=Layout(tp=2, pp=2))),
    "tp2-pp2-to-dp3": (tiny(layout=Layout(tp=2, pp=2)), tiny(layout=Layout(dp=3))),
    "dp2-to-tp4": (tiny(layout=Layout(dp=2)), tiny(layout=Layout(tp=4))),
    "vpp2-to-cp2-sp": (
        tiny(layout=Layout(pp=2, vpp=2), model=DEEP),
        tiny(layout=Layout(cp=2, tp=2, sequence_parallel=True), model=DEEP),
    ),
    "dualpipe-to-zbv": (
        tiny(layout=Layout(pp=2), schedule=ScheduleChoice("DualPipe"), micro=1, model=DEEP),
        tiny(layout=Layout(pp=2, vpp=2), schedule=ScheduleChoice("ZBVZeroBubble"), model=DEEP),
    ),
    "zero1-to-tp2": (tiny(layout=Layout(dp=3, zero=1)), tiny(layout=Layout(tp=2))),
    "pp2-to-zero1-tp2-pp2": (tiny(layout=Layout(pp=2)), tiny(layout=Layout(tp=2, pp=2, dp=3, zero=1))),
    "bf16-zero1-tp2-to-zero1-dp3": (
        tiny(layout=Layout(tp=2, dp=2, zero=1), **BF16),
        tiny(layout=Layout(dp=3, zero=1), **BF16),
    ),
    "experts-zero1-to-ep3": (
        tiny(layout=Layout(dp=3, ep=3, zero=1), model=EXPERTS),
        tiny(layout=Layout(pp=2, dp=3), model=EXPERTS),
    ),
    "zero3-to-hybrid-zero2": (
        tiny(layout=Layout(dp=3, zero=3), schedule=ScheduleChoice(max_active_stages=1)),
        tiny(
            layout=Layout(dp=4, zero=2), micro=1, data_parallel=DataParallel(None, True, bucket_bytes=30_000, shard=2)
        ),
    ),
    "bf16-hybrid-to-zero3": (
        tiny(layout=Layout(dp=4, zero=1), micro=1, data_parallel=DataParallel(shard=2), **BF16),
        tiny(layout=Layout(pp=2, dp=2, zero=3), schedule=ScheduleChoice(max_active_stages=1), **BF16),
    ),
    "offloaded-dp2-zero1-to-tp2": (
        tiny(layout=Layout(dp=2, zero=1), micro=1, offload=Offload(1, 1.0, masters=True), **BF16),
        tiny(layout=Layout(tp=2), **BF16),
    ),
    "dp3-to-offloaded-tp2-pp2": (
        tiny(layout=Layout(dp=3)),
        tiny(layout=Layout(tp=2, pp=2), offload=Offload(1, 0.6)),
    ),
    "fp16-dp2-to-tp2-with-a-moving-loss-scale": (tiny(layout=Layout(dp=2), **FP16), tiny(layout=Layout(tp=2), **FP16)),
    "sgd-zero1-to-tp2": (tiny(layout=Layout(dp=3, zero=1), **SGD), tiny(layout=Layout(tp=2), **SGD)),
    "muon-zero1-to-tp2-pp2": (
        tiny(layout=Layout(dp=3, zero=1), optimizer=Optimizer(name="muon")),
        tiny(layout=Layout(tp=2, pp=2), optimizer=Optimizer(name="muon")),
    ),
    "the-same-layout": (tiny(layout=Layout(tp=2, dp=2)), tiny(layout=Layout(tp=2, dp=2))),
    "bf16-tp2-to-pp2": (
        tiny(layout=Layout(tp=2), **BF16),
        tiny(layout=Layout(pp=2), recompute=Recompute("full"), **BF16),
    ),
    "experts-ep3-to-tp2": (
        tiny(layout=Layout(dp=3, ep=3), model=EXPERTS),
        tiny(layout=Layout(tp=2, pp=2), model=EXPERTS),
    ),
    "experts-pp2-to-ep2-etp2": (
        tiny(layout=Layout(pp=2, dp=2), model=EXPERTS),
        tiny(layout=Layout(tp=2, dp=2, ep=2, etp=2), model=EXPERTS, micro=1),
    ),
}


@sampled("name", CHANGES, on_push=4)
def test_a_run_resumed_under_another_layout_has_every_bit_of_an_undisturbed_one(name, undisturbed, tmp_path):
    first, second = (replace(plan, checkpoint=Checkpoint(str(tmp_path))) for plan in CHANGES[name])
    steps, state = undisturbed(second)
    before = train(replace(first, train=replace(first.train, steps=SAVED)))
    found = resumption(second, resume=True)
    assert found is not None and found.saved == Saved(path_of(tmp_path, SAVED), SAVED) and found.changes == ()
    after = train(second, resume=found.saved.path)
    assert numbers(before) + numbers(after) == numbers(steps)
    assert_same_end(path_of(tmp_path, STEPS), second, state)
    assert len({step.loss_scale for step in steps}) == (2 if second.precision.dtype == "fp16" else 1)


def without_format(path: Path) -> None:
    """Makes `state.json` one of an earlier version, which wrote no index."""
    state = json.loads((path / "state.json").read_text())
    del state["format"]
    (path / "state.json").write_text(json.dumps(state))


def test_a_run_with_other_frozen_groups_is_refused_by_the_states_that_it_would_lack(tmp_path):
    plan = tiny(tmp_path, layout=Layout(dp=2, zero=1))
    train(replace(plan, train=replace(plan.train, steps=SAVED)))
    frozen = replace(plan.optimizer, groups=(ParameterGroup("head.norm.weight", frozen=True),))
    with pytest.raises(RankFailure) as refused:
        train(replace(plan, optimizer=frozen), resume=path_of(tmp_path, SAVED))
    assert isinstance(refused.value.__cause__, PlanError)
    assert "optimizer.head.norm.weight.exp_avg" in str(refused.value.__cause__)
    assert "Use the [optimizer] that it was saved with" in str(refused.value.__cause__)


def test_a_run_resumed_without_the_moments_would_be_seen(undisturbed, tmp_path):
    plan = tiny(tmp_path)
    train(replace(plan, train=replace(plan.train, steps=SAVED)))
    name = "head.norm.weight"
    saved = read_with_torch(path_of(tmp_path, SAVED), shapes_of(plan))
    saved[f"optimizer.{name}.exp_avg"][0] += 1e-7
    with pytest.warns(UserWarning, match="single process|overwriting"):
        dcp.save(saved, checkpoint_id=path_of(tmp_path, SAVED), no_dist=True)
    (path_of(tmp_path, SAVED) / INDEX_FILE).unlink()
    without_format(path_of(tmp_path, SAVED))
    train(plan, resume=path_of(tmp_path, SAVED))
    with pytest.raises(AssertionError):
        assert_same_end(path_of(tmp_path, STEPS), plan, undisturbed(plan)[1])


def test_what_the_state_file_says_needs_no_torch_to_read(tmp_path):
    plan = tiny(tmp_path, steps=1)
    train(plan)
    state = json.loads((path_of(tmp_path, 1) / "state.json").read_text())
    assert (state["steps"], state["samples"]) == (1, plan.batch.global_size)
    assert state["problem"]["model"]["hidden_size"] == 16 and len(state["text"]["sha256"]) == 64


def test_checkpoints_come_every_so_many_steps_and_after_the_last_and_the_newest_stay(tmp_path):
    plan = tiny(tmp_path, layout=Layout(dp=2), steps=5)
    (tmp_path / "step-00000009.partial").mkdir()  # of a run that was ended while it saved
    (tmp_path / "notes").mkdir()
    train(replace(plan, checkpoint=replace(plan.checkpoint, every=2, keep=2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000004", "step-00000005"]
    train(replace(tiny(tmp_path / "all", steps=3), checkpoint=Checkpoint(str(tmp_path / "all"), every=1)))
    assert [saved.steps for saved in saved_in(tmp_path / "all")] == [1, 2, 3]
    assert resumption(plan, resume=True).saved.steps == 5, "there is nothing left to do"
    assert not train(plan, resume=path_of(tmp_path, 5))


def end_at(number: int, report: Path) -> None:
    """Ends this process at its so many-th change of files, counted from now; with 0 the changes are counted, a
    byte in `report` each."""
    report_fd = os.open(report, os.O_WRONLY | os.O_CREAT)
    seen = [0]

    def hook(event: str, arguments: tuple) -> None:
        opened = (
            event == "open"
            and "step-" in str(arguments[0])
            and isinstance(arguments[1], str)
            and set(arguments[1]) & set("wax+")
        )
        if opened or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            seen[0] += 1
            if number == 0:
                os.write(report_fd, b".")
            elif seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def save_numbers(transport, payload):
    """Saves tensors that are full of the number of steps; the process ends at some change of
    files, if that is given."""
    plan, steps, number, report, asynchronous = payload
    pieces = [Piece(name, (3, 2), (slice(0, 3), slice(0, 2)), torch.full((3, 2), float(steps))) for name in "ab"]
    world = transport.group("world", "world", range(1))
    checkpoints = Checkpoints(plan, Corpus.load(plan.train.data), world, transport.device)
    if number is not None:
        end_at(number, report)
    checkpoints.begin(steps, pieces, snapshot=asynchronous)
    for piece in pieces:
        if asynchronous:
            piece.tensor.fill_(-1.0)  # as training that goes on
    checkpoints.finish()


@sampled("asynchronous", [True, False], on_push=1)
def test_whenever_a_save_is_killed_the_newest_checkpoint_is_whole(asynchronous, tmp_path):
    """The process ends just before each change that the save makes: a file opened or removed, a folder
    made, renamed or removed."""
    (tmp_path / "text").write_text("a text to learn from. " * 40)

    def plan_of(number: int) -> Plan:
        """It keeps one checkpoint, so that the save removes another."""
        plan = tiny(checkpoint=Checkpoint(str(tmp_path / str(number)), keep=1))
        return replace(plan, train=replace(plan.train, data=str(tmp_path / "text")))

    def save(number: int, steps: int, end: int | None = None) -> None:
        run_threads(MemoryWorld(1), save_numbers, (plan_of(number), steps, end, None, asynchronous))

    preload(*CHECKPOINTS)

    def run_until(number: int) -> str | None:
        """How a process ended that saved a second checkpoint until its so many-th change."""
        save(number, 1)
        with Workers(1, timeout_s=60) as pool:
            try:
                pool.run(save_numbers, (plan_of(number), 2, number, tmp_path / "changes", asynchronous))
            except RankFailure as failure:
                return str(failure)
        return None

    assert run_until(0) is None
    num_changes = (tmp_path / "changes").stat().st_size
    assert num_changes > 10
    newest = []
    for number in range(1, num_changes + 1):
        end = run_until(number)
        assert end is not None and "SIGKILL" in end
        for saved in saved_in(tmp_path / str(number)):
            assert saved.state["steps"] == saved.steps
            for values in read_with_torch(saved.path, {"a": (3, 2), "b": (3, 2)}).values():
                assert torch.equal(values, torch.full((3, 2), float(saved.steps)))
        newest.append(saved.steps)
        save(number, 3)
        assert [path.name for path in (tmp_path / str(number)).iterdir()] == ["step-00000003"], (
            "nothing half is left lying"
        )
    assert newest == sorted(newest) and set(newest) == {1, 2}


def saved_by(plan: Plan, steps: int = SAVED, *, version: int = 2) -> Path:
    """What a run of a plan leaves, as far as decisions before training go by it; `version` is that of its numerics."""
    path = path_of(Path(plan.checkpoint.folder), steps)
    path.mkdir(parents=True)
    state = {"steps": steps, "samples": steps * plan.batch.global_size, "problem": problem_of(plan)}
    record = recorded_numerics(plan)
    if version == 1:
        state["problem"]["numerics"] = {name: value for name, value in record.pinned.items() if name != PRODUCTS}
    else:
        state["numerics"] = {**record.to_json(), "version": version}
    (path / "state.json").write_text(json.dumps(state))
    return path


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": replace(DENSE, hidden_size=32)}, "model.hidden_size=32, saved with 16"),
        ({"model": replace(DENSE, tied_embeddings=False)}, "model.tied_embeddings=false, saved with true"),
        ({"batch": Batch(12, 2, 8)}, "batch.global=12, saved with 6"),
        ({"batch": Batch(6, 2, 16)}, "batch.sequence=16, saved with 8"),
        ({"train": Train(steps=STEPS, learning_rate=1e-2, seed=5)}, "train.seed=5, saved with 1234"),
        ({"optimizer": Optimizer("sgd", clip_grad_norm=0.1)}, 'optimizer.name="sgd", saved with "adamw"'),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(changed, sentence, tmp_path):
    plan = tiny(tmp_path)
    path = saved_by(plan)
    with pytest.raises(PlanError) as refused:
        Trainer(replace(plan, **changed), resume=True)
    assert refused.value.problems == (
        f"{path} is of another run: {sentence}. Use the plan that it was saved with, or another checkpoint.folder.",
    )


def test_what_changes_bits_and_nothing_else_is_said_and_layouts_are_not(tmp_path):
    plan = tiny(tmp_path)
    saved_by(plan)
    moved = tiny(tmp_path, Layout(tp=2, dp=3), micro=1, steps=9)
    assert Trainer(moved, resume=True).resumption.changes == ()
    other = replace(moved, optimizer=Optimizer(clip_grad_norm=2.0), model=replace(DENSE, hidden_dropout=0.0))
    assert Trainer(other, resume=True).resumption.changes == (
        "model.hidden_dropout=0.0, saved with 0.1",
        "optimizer.clip_grad_norm=2.0, saved with 0.1",
    )
    fast = Trainer(replace(moved, numerics=Numerics("fast")), resume=True).resumption
    assert fast.changes == ('numerics.mode="fast", saved with "exact"',)


@pytest.mark.parametrize("version", [1, 2])
def test_other_leaves_are_named_whichever_version_recorded_them(tmp_path, version):
    plan = tiny(tmp_path / "run")
    saved_by(plan, version=version)
    block = plan.leaf_sizes.gradient_token_block
    other = replace(plan, numerics=replace(plan.numerics, gradient_token_block=block // 2))
    changes = Trainer(other, resume=True).resumption.changes
    assert f"numerics.gradient_token_block={block // 2}, saved with {block}" in changes
    assert Trainer(plan, resume=True).resumption.changes == ()


def test_a_checkpoint_whose_products_were_made_otherwise_says_so_and_how_to_have_its_bits(tmp_path, capfd):
    plan = tiny(tmp_path / "run", steps=2)
    train(replace(plan, train=replace(plan.train, steps=1)))
    (path,) = (saved.path for saved in saved_in(tmp_path / "run"))
    state = json.loads((path / "state.json").read_text())
    state["numerics"][PRODUCTS] = ["contract"]
    (path / "state.json").write_text(json.dumps(state))
    without_format(path)
    (path / INDEX_FILE).unlink()
    assert Trainer(plan, resume=True).resumption.changes == ()  # ranks choose products, and say it
    train(plan, resume=path)
    assert (
        'was saved with numerics.triton_products=["contract"], and this run has [], so bits will differ from that '
        'run\'s. Set numerics.triton_products=["contract"] to have its bits.'
    ) in capfd.readouterr().err


def test_a_checkpoint_of_another_machine_says_so(tmp_path, capfd):
    plan = tiny(tmp_path / "run", steps=2)
    train(replace(plan, train=replace(plan.train, steps=1)))
    (path,) = (saved.path for saved in saved_in(tmp_path / "run"))
    state = json.loads((path / "state.json").read_text())
    assert state["numerics"]["machine"]["device"] == "cpu"
    state["numerics"]["machine"] = {"torch": "1.0", "device": "cpu"}
    (path / "state.json").write_text(json.dumps(state))
    without_format(path)
    (path / INDEX_FILE).unlink()
    train(plan, resume=path)
    assert "was saved on another machine (torch is 2." in capfd.readouterr().err


def test_numerics_of_a_later_version_are_refused_by_name(tmp_path):
    plan = tiny(tmp_path / "run")
    saved_by(plan, version=3)
    with pytest.raises(PlanError, match="its numerics are recorded as version 3, and this shardproof reads 1 and 2"):
        Trainer(plan, resume=True)


def test_folders_that_a_run_cannot_use_are_reported_before_it_starts(tmp_path):
    plan = tiny(tmp_path / "run")
    assert Trainer(plan, resume=True).resumption is None, (
        "nothing was saved yet: the first start of a job that may be restarted"
    )
    path = saved_by(plan, steps=9)
    with pytest.raises(
        PlanError, match=r"holds a run already, saved after 9 steps \(step-00000009\)\. Use --resume to go on with it"
    ):
        Trainer(plan)
    with pytest.raises(
        PlanError, match=r"saved after 9 steps, but the run ends after train\.steps=3\. Use train\.steps=9 or more"
    ):
        Trainer(plan, resume=True)
    (path / "state.json").write_text("{")
    with pytest.raises(PlanError, match=r"state\.json cannot be read .*\n.*has no whole checkpoint to go on from"):
        Trainer(replace(plan, train=replace(plan.train, steps=9)), resume=True)
    with pytest.raises(PlanError, match=r"Set checkpoint\.folder"):
        Trainer(tiny(), resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="is a file"):
        Trainer(tiny(tmp_path / "file"))
    with pytest.raises(PlanError, match=r"checkpoint\.folder='.*/file/run': .*/file is a file"):
        Trainer(tiny(tmp_path / "file" / "run"))
    with pytest.raises(PlanError, match=r"keep=2 is about checkpoints, but there is no folder"):
        tiny(checkpoint=Checkpoint(keep=2))


def test_a_run_does_not_go_on_with_another_text_than_it_was_saved_with(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text to learn from. " * 40)
    plan = tiny(tmp_path / "run", steps=1)
    plan = replace(plan, train=replace(plan.train, data=str(tmp_path / "a.txt")))
    train(plan)
    moved = (tmp_path / "a.txt").rename(tmp_path / "moved.txt")
    assert not train(replace(plan, train=replace(plan.train, data=str(moved))), resume=path_of(tmp_path / "run", 1))
    other = replace(plan, train=replace(plan.train, data=str(tmp_path / "b.txt"), steps=2))
    with pytest.raises(
        PlanError, match=r"text of \d+ bytes with SHA-256 .*, but train\.data=.*b\.txt.* so other samples would follow"
    ):
        Trainer(other, transport="memory", resume=True).fit()


def test_a_damaged_checkpoint_is_named_and_not_taken_for_a_fault_of_a_rank(tmp_path):
    plan = tiny(tmp_path, steps=1)
    train(plan)
    file = path_of(tmp_path, 1) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    plan = replace(plan, train=replace(plan.train, steps=2))
    with pytest.raises(
        PlanError,
        match=r"__0_0\.distcp has \d+ bytes instead of \d+; tensors .*\n.*has no whole checkpoint to go on from",
    ):
        Trainer(plan, transport="memory", resume=True).fit()


def die_while_saving(transport, plan):
    """Rank 1 is killed when the save after the second step, which is written like the first, comes to its third
    tensor."""
    written, bytes_of = [], again.bytes_of

    def counted(tensor):
        written.append(tensor)
        if transport.global_rank == 1 and len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return bytes_of(tensor)

    again.bytes_of = counted
    train_rank(transport, TrainJob(plan, validate=False))


def test_a_rank_that_dies_while_it_saves_ends_the_job_and_processes_go_on_from_the_checkpoint_before(
    undisturbed, tmp_path
):
    plan = tiny(tmp_path, Layout(tp=2), checkpoint=Checkpoint(str(tmp_path), every=1))
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL"), Workers(2, timeout_s=60) as pool:
        pool.run(die_while_saving, plan)
    assert [saved.steps for saved in saved_in(tmp_path)] == [1] and (tmp_path / "step-00000002.partial").is_dir()
    other = tiny(tmp_path, Layout(dp=3), checkpoint=Checkpoint(str(tmp_path), every=1))
    result = Trainer(other, resume=True).fit()
    steps, state = undisturbed(other)
    assert result.losses == tuple(step.loss for step in steps[1:]) and (result.first_step, result.steps) == (1, 2)
    assert [saved.steps for saved in saved_in(tmp_path)] == [1, 2, 3] and not list(tmp_path.glob("*.partial"))
    assert_same_end(path_of(tmp_path, STEPS), other, state)


def test_the_command_line_resumes_and_names_the_checkpoint(tmp_path, capsys):
    run = [
        "train",
        "--model",
        "tiny-gpt",
        "--dtype",
        "fp32",
        "--global-batch",
        "2",
        "--sequence",
        "8",
        "--transport",
        "memory",
    ]
    run += ["--set", "model.num_layers=2", "--set", "model.hidden_size=16", "--set", "model.ffn_hidden_size=32"]
    run += ["--set", f"checkpoint.folder={tmp_path}", "--set", "numerics.mode=exact"]
    assert main([*run, "--devices", "2", "--tp", "2", "--set", "train.steps=2", "--resume"]) == 0
    captured = capsys.readouterr()
    assert f"resume: no checkpoint in {tmp_path} yet" in captured.err
    assert captured.out.endswith(f"\ncheckpoint {tmp_path}/step-00000002\n")
    assert main([*run, "--devices", "2", "--pp", "2", "--set", "train.steps=3", "--json"]) == 2
    assert "Use --resume to go on with it" in capsys.readouterr().err
    again = [
        *run,
        "--devices",
        "2",
        "--pp",
        "2",
        "--set",
        "train.steps=3",
        "--set",
        "train.learning_rate=1e-4",
        "--resume",
    ]
    assert main([*again, "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["checkpoint"], report["first_step"], report["steps"]) == (f"{tmp_path}/step-00000003", 2, 1)
    assert "after 2 steps\nother than in the run that saved it" in captured.err
    assert "train.learning_rate=0.0001, saved with 0.0003" in captured.err
    assert main([*again, "-o", str(tmp_path / "run.timeline.json")]) == 2
    assert "no step of train.steps=3 is left to measure" in capsys.readouterr().err
