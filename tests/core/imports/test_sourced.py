"""Files that a Megatron script takes in: what lies next to it is read and never executed, the rest is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.core.commands.cli import main
from shardproof.core.imports.account import Imported, Request
from shardproof.core.imports.given import import_file
from shardproof.core.imports.shell_sourced import MOST_CHARACTERS

TRAINS = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 512 --micro-batch-size 1 --bf16 --tensor-model-parallel-size $TP $MORE\n"
)


def imported(folder: Path, first_line: str, **files: str) -> Imported:
    """What a script says that takes in `files`, by name without their ending."""
    for name, text in files.items():
        (folder / "conf").mkdir(exist_ok=True)
        (folder / "conf" / f"{name}.sh").write_text(text)
    script = folder / "pretrain.sh"
    script.write_text(f"#!/bin/bash\n{first_line}\n{TRAINS}")
    found = import_file(Request(script.read_text(), str(script)))
    assert found is not None
    return found


def refused(found: Imported) -> list[tuple[int, str]]:
    return [(each.line, each.flag) for each in found.of_status("refused")]


@pytest.mark.parametrize(
    "line",
    [
        "source conf/model.sh",
        ". ./conf/model.sh",
        'NAME=model; source "conf/${NAME}.sh"',
        'source $(dirname "$0")/conf/model.sh',
        'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"; source "$HERE/conf/model.sh"',
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"; source "$HERE/conf/model.sh"',
        'source "$(dirname "$(readlink -f "$0")")/conf/model.sh"',
        'HERE=$(cd "$(dirname "$0")" >/dev/null 2>&1 && pwd -P); source "${HERE}/conf/model.sh"',
    ],
)
def test_what_lies_next_to_the_script_is_followed_and_its_values_have_the_line_that_takes_it_in(tmp_path, line):
    touched = tmp_path / "touched"
    model = f"TP=2\nMORE=(--swiglu)\ntouch {touched}\nMORE=${{MORE[@]}}\nsource conf/more.sh\nreturn\nTP=4\n"
    found = imported(tmp_path, line, model=model, more='MORE="$MORE --qk-layernorm"')
    assert (refused(found), not touched.exists()) == ([], True)
    model_values = found.values["model"]
    assert found.values["layout"]["tp"].value == 2
    assert (model_values["activation"].value, model_values["qk_norm"].value) == ("swiglu", True)
    (more,) = [each for each in found.settings if each.flag == "--swiglu"]
    assert more.line == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("TP=2 MORE=; source /etc/profile", "it does not lie next to the script"),
        ("TP=2 MORE=; source ../other.sh", "it does not lie next to the script"),
        ("TP=2 MORE=; source $HOME/env.sh", "which file this is is not known ($HOME is not set in the script)"),
        ("TP=2 MORE=; source conf/link.sh", "it does not lie next to the script"),
    ],
)
def test_what_lies_elsewhere_is_said_with_its_line(tmp_path, line, why):
    line = line.replace("TP=2 MORE=;", "TP=2; MORE=;")
    (tmp_path / "conf").mkdir()
    (tmp_path.parent / "other.sh").write_text("TP=4")
    (tmp_path / "conf" / "link.sh").symlink_to(tmp_path.parent / "other.sh")
    found = imported(tmp_path, line)
    (said,) = [each for each in found.settings if each.flag == "source"]
    assert (said.status, said.line) == ("not-modelled", 2) and said.why.startswith(why)
    assert refused(found) == [] and found.values["layout"]["tp"].value == 2


def test_what_megatron_needs_may_be_in_a_file_that_is_not_read(tmp_path):
    script = tmp_path / "pretrain.sh"
    script.write_text("source ../small.sh\ntorchrun pretrain_gpt.py --num-layers 8 --micro-batch-size 1 $MODEL\n")
    found = import_file(Request(script.read_text(), str(script)))
    assert found is not None
    (why,) = [each.why for each in found.of_status("refused") if each.flag == "--hidden-size"]
    assert why.endswith("Megatron needs it; line 1 takes in ../small.sh, which is not read")


def test_a_variable_of_a_file_that_is_not_read_is_refused_where_it_decides(tmp_path):
    found = imported(tmp_path, "MORE=; source /etc/cluster.sh")
    assert refused(found) == [(3, "--tensor-model-parallel-size")]


def test_a_file_that_is_missing_wrong_or_endless_is_refused_with_its_line(tmp_path, capsys):
    found = imported(tmp_path, "TP=2; MORE=; source conf/none.sh")
    assert refused(found) == [(2, "source")]
    long = imported(tmp_path, "TP=2; MORE=; source conf/long.sh", long="#" * (MOST_CHARACTERS + 1))
    assert refused(long) == [(2, "source")]
    itself = imported(tmp_path, "TP=2; MORE=; source conf/itself.sh", itself="source conf/itself.sh\nTP=4")
    assert (refused(itself), itself.values["layout"]["tp"].value) == ([], 4)
    (tmp_path / "conf" / "broken.sh").write_text("if true; then\nTP=2\n")
    script = tmp_path / "pretrain.sh"
    script.write_text(f"source conf/broken.sh\n{TRAINS}")
    assert main(["import", str(script)]) == 2
    assert f"{script}:1: this script is not understood: conf/broken.sh: " in capsys.readouterr().err
