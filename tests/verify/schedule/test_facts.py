"""Facts of a schedule: the TOML file, the CLI options, and the rules about layers and message formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof.core.base.errors import FileError, ScheduleError
from shardproof.core.commands.cli import main
from shardproof.core.schedule import CATALOG, build, lower
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.schedule.check import check
from shardproof.verify.schedule.facts import (
    ActivationMemory,
    Buffers,
    Facts,
    LayerHoldings,
    MessageFormats,
)
from shardproof.verify.schedule.facts_file import facts_from_toml
from shardproof.verify.schedule.plan_facts import layer_holdings, message_formats

PIPELINE = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n"
TEXT = """
[memory]
stage_bytes = [8, 8]
capacity_bytes = [32, 16]
[messages]
outputs = ["bf16[1,32,64]", ""]
inputs = ["", "bf16[1, 32, 64]"]
[buffers]
outputs = 2
inputs = [4, 3]
activations = [[0], [1]]
recv_buffers = 1
[layers]
model = 2
stages = [["embedding", "layers.0"], ["layers.1", "head"]]
"""


def test_every_table_of_the_file_becomes_its_part() -> None:
    schedule = Schedule.from_csv(PIPELINE)
    facts = facts_from_toml(TEXT, schedule)
    assert facts == Facts(
        memory=ActivationMemory((8, 8), (32, 16)),
        messages=MessageFormats(("bf16[1,32,64]", ""), ("", "bf16[1, 32, 64]")),
        buffers=Buffers(outputs=2, inputs=(4, 3), activations=((0,), (1,)), recv_buffers=1),
        layers=LayerHoldings(
            ("embedding", "layers.0", "layers.1", "head"), (("embedding", "layers.0"), ("layers.1", "head"))
        ),
    )
    assert check(schedule, facts=facts) == []


def test_all_problems_of_a_file_are_reported_together_with_the_closest_name() -> None:
    text = '[bufers]\noutputs = 2\n[buffers]\noutput = 2\ninputs = "many"\n[memory]\nstage_bytes = [1]\n'
    with pytest.raises(ScheduleError) as caught:
        facts_from_toml(text, Schedule.from_csv(PIPELINE))
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert "unknown table [bufers]; did you mean 'buffers'?" in lines[0]
    assert "unknown key buffers.output; did you mean 'outputs'?" in lines[1]
    assert "buffers.inputs='many' must be a ring size" in lines[2]
    assert "[memory] lacks capacity_bytes" in lines[3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[memory\n", "facts.toml"),
        ('[collectives]\nfile = "x.csv"\n', "needs a plan"),
        ("memory = 3\n", "unknown table"),
    ],
)
def test_files_that_cannot_be_used_are_refused(text: str, message: str) -> None:
    with pytest.raises((FileError, ScheduleError), match=message):
        facts_from_toml(text, Schedule.from_csv(PIPELINE))


@pytest.mark.parametrize(
    "facts",
    [
        Facts(messages=MessageFormats(("a",), ("a", "b"))),
        Facts(layers=LayerHoldings(("a",), (("a",),))),
        Facts(memory=ActivationMemory((1, 2, 3), (1, 2))),
    ],
)
def test_facts_of_another_size_than_the_schedule_are_refused(facts: Facts) -> None:
    with pytest.raises(ScheduleError, match="entries, but schedule"):
        check(Schedule.from_csv(PIPELINE), facts=facts)


def test_a_message_of_another_type_is_found_once_per_hop_at_its_first_receive() -> None:
    schedule = lower(build("1F1B", pp=3, num_microbatches=4))
    formats = MessageFormats(("bf16[1,8,16]", "fp32[1,8,16]", ""), ("", "bf16[1,8,16]", "bf16[1,8,16]"))
    findings = check(schedule, facts=Facts(messages=formats))
    assert [(finding.rule, finding.where) for finding in findings] == [("message-format", "rank 2, step 0, 2RECV_F0")]
    assert findings[0].what.startswith("stage 1 sends fp32[1,8,16], and stage 2 expects bf16[1,8,16]")


def test_layers_of_a_plan_are_those_of_the_model_and_one_lost_is_found(plan_of) -> None:
    plan = plan_of("Interleaved1F1B")
    holdings = layer_holdings(plan)
    assert holdings.model == ("embedding", *(f"layers.{layer}" for layer in range(12)), "head")
    assert [layer for stage in holdings.stages for layer in stage] == list(holdings.model)
    schedule = build("Interleaved1F1B", pp=3, vpp=2, num_microbatches=6)
    broken = LayerHoldings(holdings.model, (*holdings.stages[:3], holdings.stages[3][1:], *holdings.stages[4:]))
    findings = check(schedule, plan=plan, facts=Facts(layers=broken))
    assert [(finding.rule, finding.what) for finding in findings] == [("missing-layer", "no stage holds layers.6.")]


def test_messages_of_a_plan_have_the_bytes_of_its_program(plan_of) -> None:
    from shardproof.core.program import message_bytes

    for sp in (False, True):
        plan = plan_of("1F1B", sp=sp, mode="fast")
        (text,) = set(message_formats(plan).outputs)
        element, shape = text.rstrip("]").split("[")
        sizes = list(map(int, shape.split(",")))
        assert message_bytes(plan) == sizes[0] * sizes[1] * sizes[2] * {"fp32": 4, "bf16": 2}[element]


SMALL = [
    "--model",
    "llama3-8b",
    "--cluster",
    "dgx-h100",
    "--devices",
    "8",
    "--pp",
    "4",
    "--tp",
    "2",
    "--global-batch",
    "8",
]


def test_facts_on_the_command_line_are_checked_and_mark_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "schedule.csv").write_text(lower(build("1F1B", pp=2, num_microbatches=4)).to_csv())
    (tmp_path / "facts.toml").write_text("[buffers]\noutputs = 1\n")
    command = ["verify", str(tmp_path / "schedule.csv"), "--facts", str(tmp_path / "facts.toml")]
    assert main(command) == 1
    text = capsys.readouterr().out
    assert "buffer-reuse at rank 0, step 2, 0F1" in text and ">0F1<" in text
    (tmp_path / "facts.toml").write_text("[buffers]\noutputs = 2\n")
    assert main(command) == 0
    (tmp_path / "facts.toml").write_text("[buffers]\nshelf = 2\n")
    assert main(command) == 2


def test_collectives_of_a_plan_written_and_read_back_pass_and_swapped_ones_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, facts = tmp_path / "calls.csv", tmp_path / "facts.toml"
    assert main(["verify", *SMALL, "--write-collectives", str(calls)]) == 0
    facts.write_text('[collectives]\nfile = "calls.csv"\n')
    assert main(["verify", *SMALL, "--facts", str(facts)]) == 0
    rows = [line.split(",") for line in calls.read_text().splitlines()]
    rows[5][0], rows[5][1] = rows[5][1], rows[5][0]
    calls.write_text("\n".join(map(",".join, rows)) + "\n")
    capsys.readouterr()
    assert main(["verify", *SMALL, "--facts", str(facts), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {finding["rule"] for finding in report["findings"]} == {"collective-order"}
    assert "call 0 of rank 5 on tp (ranks 4, 5)" in report["findings"][0]["what"]


def test_a_plan_is_needed_to_write_collectives(tmp_path: Path) -> None:
    (tmp_path / "schedule.csv").write_text(PIPELINE)
    assert main(["verify", str(tmp_path / "schedule.csv"), "--write-collectives", str(tmp_path / "calls.csv")]) == 2


def test_gpipe_with_many_microbatches_is_right_and_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "schedule.csv").write_text(build("GPipe", pp=3, num_microbatches=7).to_csv())
    assert main(["verify", str(tmp_path / "schedule.csv"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and {finding["severity"] for finding in report["findings"]} == {"warning"}
    assert [finding["rule"] for finding in report["findings"]] == ["activation-growth"]
    assert report["sends"] == {"rendezvous": True, "buffered": True, "stream-ordered": True}
    assert check(build("GPipe", pp=3, num_microbatches=7)) == []
    assert check(build("GPipe", pp=3, num_microbatches=6), warnings=True) == []
    assert len(check(build("GPipe", pp=3, num_microbatches=19), warnings=True)) == 3
    assert check(build("1F1B", pp=3, num_microbatches=70), warnings=True) == []


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 6])
def test_only_gpipe_and_its_looped_form_hold_every_microbatch_at_once(pp: int) -> None:
    warned, asked = set(), set()
    for name, entry in CATALOG.items():
        vpp = entry.nearest_vpp(2)
        for num_microbatches in (2 * pp + 1, 2 * pp + 2, 4 * pp + 1, 6 * pp + 1, 6 * pp + 2):
            if entry.problem(pp=pp, vpp=vpp, num_microbatches=num_microbatches) is None:
                asked.add(name)
                schedule = build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
                warned |= {name for _ in check(schedule, warnings=True)}
    assert warned == {"GPipe", "LoopedBFS"}
    assert len(asked) >= len(CATALOG) - 1
