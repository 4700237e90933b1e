"""The page `docs/rules.md`, made from the table of rules: `python -m
shardproof.verify.schedule.rules_page > docs/rules.md`."""

from __future__ import annotations

from ...core.schedule.schedule import Schedule
from .check import examine
from .facts import BUFFER_KINDS, Facts
from .grid import grid
from .rules import RULES, Rule

_OPENING = """\
# The static rules

Made from the table in `verify/rules` by `python -m shardproof.verify.schedule.rules_page`; a test holds it current. `shardproof verify --list`
prints the same rules, `shardproof verify PLAN` asks them, and `shardproof.check(schedule)` returns what they find.

Each rule stands with the smallest schedule that breaks it and nothing else, drawn as steps and ranks with the cells at fault between
`>` and `<`, and with what is reported. The tests run every one of them. Rules are asked in this order; where earlier ones find
something, later ones that count on them wait. Rules marked *needs* are asked when the plan says, or a file given with
`--facts FILE` (in Python `check(..., facts=...)`), what they are about:

```toml
[memory]        # bytes of activations that a microbatch keeps on each stage, and what each pipeline rank has for them
stage_bytes = [8, 8]
capacity_bytes = [32, 16]
[messages]      # shape and type of what a stage sends forward and of what it allocates to receive; gradients go back the same way
outputs = ["bf16[1,4096,8192]", ""]
inputs = ["", "bf16[1,4096,8192]"]
[buffers]       # memory that is used again within a step: a ring size (microbatch i in slot i mod size), one per stage, or every slot
outputs = 2     # made by F, read by SEND_F        inputs: filled by RECV_F        activations: from F to the end of the backward
inputs = [4, 3] # output_gradients: filled by RECV_B        input_gradients: made by the backward, read by SEND_B
recv_buffers = 2  # receives posted ahead of their place on each lane
[layers]        # the model's layers in order (a number stands for embedding, so many layers, head) and those of each stage
model = 2
stages = [["embedding", "layers.0"], ["layers.1", "head"]]
[collectives]   # what every global rank calls, in order: one line per rank, cells <action>:<op>:<axis>:<layer>
file = "calls.csv"
```

`shardproof verify PLAN --write-collectives calls.csv` writes the collectives that a plan implies, to compare with those recorded from
a real run. `layers`, `messages` and `collectives` follow from a plan; `memory` and `buffers` are given.

A send has three meanings: *rendezvous* (it ends when its receive does; gloo), *buffered* (it ends at once) and *stream-ordered* (one
in-order queue per rank and direction next to the compute; NCCL). A schedule passes when it runs with all three, blocking and in list
order; `buffer-reuse` takes the weakest promise, rendezvous with a compute lane that never waits for a send to leave.
"""


def rules_page() -> str:
    """The whole page as Markdown."""
    table = ["| rule | what holds |", "|---|---|", *(f"| [{rule.name}](#{rule.name}) | {rule.doc} |" for rule in RULES)]
    return "\n".join([_OPENING, *table, "", *(_section(rule) for rule in RULES)])


def _section(rule: Rule) -> str:
    examination = examine(Schedule.from_csv(rule.example), facts=rule.example_facts, warnings=True)
    marked = [
        index
        for _, violation in examination.violations
        for index in (violation.index, *violation.related)
        if index is not None
    ]
    needs = [f"Needs `[{rule.needs}]`{_given(rule.example_facts)}.", ""] if rule.needs is not None else []
    severity = ["A warning: the schedule is right all the same.", ""] if rule.severity == "warning" else []
    found = str(examination.findings[0]).splitlines()[0]
    picture = grid(examination.schedule, marked)
    return "\n".join(
        [f"## {rule.name}", "", f"{rule.doc} {rule.hint}", "", *severity, *needs, "```", picture, "", found, "```", ""]
    )


def _given(facts: Facts | None) -> str:
    """The facts of an example in words."""
    if facts is None:
        return ""
    if facts.memory is not None:
        return (
            f", here stage_bytes = {list(facts.memory.stage_bytes)}, capacity_bytes = "
            f"{list(facts.memory.capacity_bytes)}"
        )
    if facts.messages is not None:
        return f", here outputs = {list(facts.messages.outputs)}, inputs = {list(facts.messages.inputs)}"
    if facts.layers is not None:
        return f", here stages = {[list(stage) for stage in facts.layers.stages]}"
    if facts.buffers is not None:
        given = {name: getattr(facts.buffers, name) for name in BUFFER_KINDS}
        return ", here " + ", ".join(f"{name} = {list(slots)}" for name, slots in given.items() if slots is not None)
    assert facts.collectives is not None
    lines = "; ".join(
        f"rank {rank} calls `{line}`" for rank, line in enumerate(facts.collectives.to_csv().splitlines())
    )
    return f", here {lines}"


if __name__ == "__main__":
    print(rules_page(), end="")
