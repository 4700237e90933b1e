"""What a script starts, against bash itself: each script is run with a `torchrun` that prints its arguments."""

from __future__ import annotations

import subprocess

import pytest

from shardproof.core.imports.shell import commands_of
from shardproof.core.imports.shell_nodes import ShellSyntaxError

PRINTS = "torchrun() { printf '<%s>' \"$@\"; echo; }\n"

SCRIPTS = {
    "quoting": """torchrun a'b c'd "x $HOME_OF" $'t\\tab\\'' \\$x "q\\"q" '' "" 'it'\\''s' "\\n" a\\ b""",
    "continued lines": 'torchrun one \\\n  two "three \\\nfour" \\\n  # a comment ends the command\n',
    "splitting": 'A=\'1  2\'; B=; torchrun $A "$A" $B "$B" x${A}y',
    "arrays": 'A=(1 "2 3" # no\n 4); A+=(5); torchrun "${A[@]}" ${A[@]} "${A[*]}" ${#A[@]} ${A[1]} $A "x${A[@]}y"',
    "empty array": 'A=(); torchrun a "${A[@]}" ${A[@]} b',
    "defaults": 'unset X; torchrun ${X:-d e} "${X:-d e}" ${X-z} ${X:+no} "${Y:=new}" $Y; Y=; torchrun ${Y:-f} ${Y-g}',
    "alternatives": "X=1; E=; torchrun ${X:+yes} ${E:+no} ${E+set}",
    "trimming": "F=/a/b.c.tar.gz; torchrun ${F##*/} ${F#*/} ${F%.*} ${F%%.*} ${F/a/x} ${F//./_} ${#F} ${F:1:3}",
    "cases of letters": "F=aBc; torchrun ${F^^} ${F,,}",
    "arithmetic": "A=7; torchrun $((A*2+1)) $(( (A+1) / 2 )) $((-A/2)) $((A%4)) $((2**5)) $((A>3 && A<9))",
    "arithmetic of variables": "A=7; torchrun $(($A * ${A}))",
    "if": 'A=2; if [ $A -gt 1 ] && [[ "$A" == 2 ]]; then torchrun yes; else torchrun no; fi; [ -z "" ] && torchrun z',
    "elif": "A=b; if [[ $A = a ]]; then torchrun a; elif [[ $A == b* || $A = c ]]; then torchrun b; else exit; fi",
    "not": 'A=x; if ! [ -n "$A" ]; then torchrun a; fi; if [[ ! -z $A && ( $A != y ) ]]; then torchrun b; fi',
    "case": "A=7b; case $A in 1b) torchrun 1 ;; 7?|8*) torchrun 7 ;; *) torchrun other ;; esac",
    "for": 'for A in 1 "2 3" x; do torchrun $A; done',
    "continue": "for A in 1 2; do if [ $A = 1 ]; then continue; fi; torchrun $A; done",
    "while": "A=0; while [ $A -lt 3 ]; do A=$((A+1)); done; torchrun $A",
    "function": 'f() { local B=$1; torchrun "$@" $B $# "$*"; }; f 1 "2 3"',
    "return": "function g { torchrun g; return; torchrun no; }; g",
    "subshell": "A=1; (A=2; torchrun $A); torchrun $A; { A=3; }; torchrun $A",
    "eval": 'X=\'torchrun a "b c"\'; eval $X; eval "torchrun $HOME_OF \\"d e\\""; Y=\'torchrun p q\'; $Y',
    "exit": "torchrun a; if [ 1 = 1 ]; then exit 0; fi; torchrun b",
    "here-document": "cat <<E1 > /dev/null\ntorchrun no $X\nE1\ntorchrun yes",
    "quoted here-document": "cat <<'E2' >/dev/null\n$(x)\nE2\ntorchrun more",
    "here-document read": "read -r -d '' X <<E1\na $HOME_OF\nE1\ntorchrun $X",
    "redirections": "torchrun a 2>&1 > /dev/stdout; torchrun b 2>/dev/null; torchrun c <<< text",
    "comments": "# torchrun no\ntorchrun a#b # c\ntorchrun '#d'",
    "append": "A=x; A+=y; A+=' z'; torchrun $A \"$A\"",
    "ternary lists": "true && A=1 || A=2; false && B=3 || B=4; false || torchrun $A $B",
    "carriage": "A=1;  torchrun\t$A\t\n\n;torchrun b".replace("\n;", "\n"),
    "(( ))": "A=3; if (( A > 2 )); then torchrun big; fi; (( $A == 4 )) || torchrun no4",
    "exported": "export A=1 B='2 3'; declare -x C=4; readonly D=5; torchrun $A \"$B\" $C $D",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_arguments_are_those_that_bash_passes(name):
    script = SCRIPTS[name]
    ran = subprocess.run(
        ["bash", "-c", PRINTS + script], capture_output=True, text=True, env={"HOME_OF": "h w"}, timeout=20
    )
    mine = [
        "".join(f"<{argument.text}>" for argument in started.arguments[1:])
        for started in commands_of(script, {"HOME_OF": "h w"})
        if started.arguments[0].text == "torchrun"
    ]
    assert "\n".join(mine) == ran.stdout.strip("\n"), ran.stderr


def test_lines_are_those_of_the_words_wherever_they_are_used():
    script = 'A="--x 1\n--y 2"\nB=(\n --z 3\n)\nrun $A "${B[@]}" \\\n --w\n'
    (started,) = commands_of(script, {})
    assert [(each.text, each.line) for each in started.arguments] == [
        ("run", 6), ("--x", 1), ("1", 1), ("--y", 2), ("2", 2), ("--z", 4), ("3", 4), ("--w", 7)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("run $(hostname)", "$(hostname) is not executed"),
        ("run `hostname`", "`hostname` is not executed"),
        ("run $X", "$X is not set in the script"),
        ("run $1", "$1 is an argument of the script"),
        ("run $((X*2))", "$X is not set in the script"),
        ("A=$(date); run $A", "$(date) is not executed"),
        ("if [ $X = 1 ]; then A=1; else A=2; fi; run $A", "$X is not set in the script, and line 1 sets $A by it"),
    ],
)
def test_what_is_not_known_says_why(script, why):
    (started,) = commands_of(script, {})
    assert started.arguments[1].unknown == why


def test_branches_that_agree_are_known_and_those_that_leave_do_not_count():
    script = "if [ $X = 1 ]; then A=1; B=2; else A=1; exit 1; fi\nif [ $Y ]; then C=5; else C=5; fi\nrun $A $B $C"
    (started,) = commands_of(script, {})
    assert [each.text for each in started.arguments] == ["run", "1", "2", "5"]
    assert not any(each.unknown for each in started.arguments)


def test_given_variables_count_where_the_script_does_not_know_its_own():
    (started,) = commands_of("TP=$1; PP=4; run $TP $PP $CP", {"TP": "8", "PP": "9", "CP": "2"})
    assert [each.text for each in started.arguments] == ["run", "8", "4", "2"]


@pytest.mark.parametrize(
    "script",
    [
        "run 'a",
        'run "a',
        "if true; then run",
        "run $(a",
        "run ${a",
        "A=(1 2",
        "fi",
        "run )",
        "case a in (",
        "case a in b;",
        "for a in )",
        "a=(;",
    ],
)
def test_texts_that_are_no_bash_are_an_error(script):
    with pytest.raises(ShellSyntaxError):
        commands_of(script, {})


@pytest.mark.parametrize(
    "script",
    [
        "f() { f; }; f",
        "A='eval $A'; eval $A",
        "while true; do A=$((A+1)); done; run $A",
        "for a in 1 2 3 4 5 6 7 8; do for b in 1 2 3 4 5 6 7 8; do B+=$a; done; done; run $B",
    ],
)
def test_scripts_that_would_not_end_do(script):
    assert all(each.arguments for each in commands_of(script, {}))


def test_texts_that_grow_without_end_are_an_error():
    with pytest.raises(ShellSyntaxError, match=r"\$A grows"):
        commands_of("A=xxxxxxxx; while true; do A=$A$A; done", {})
