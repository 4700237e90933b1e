"""Ranks start fast, run jobs, and however one of them ends, the others end too and the failure names it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from helpers.gates import sampled
from shardproof.backend.base.mkl import mkl_switch, mkl_switch_is_set
from shardproof.backend.launching.launch import Workers, preload, run_ranks
from shardproof.backend.transport.base import TransportError
from shardproof.backend.watch.rank_failures import describe_exit
from shardproof.core.base.errors import PlanError, RankFailure


def who_job(transport, payload):
    return (
        transport.global_rank,
        transport.world_size,
        os.getpid(),
        torch.get_num_threads(),
        os.environ["MKL_CBWR"],
        payload,
    )


def ended(pids, within_s=600.0):
    """True when no process of `pids` is left."""
    deadline_s = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def test_four_gloo_ranks_are_four_processes_with_one_thread_and_the_mkl_switch():
    results = run_ranks(who_job, "payload", world_size=4)
    assert [result[:2] for result in results] == [(rank, 4) for rank in range(4)]
    assert len({result[2] for result in results} | {os.getpid()}) == 5
    assert {result[3:] for result in results} == {(1, mkl_switch(), "payload")}
    assert ended(result[2] for result in results)


def test_four_memory_ranks_share_one_process_that_is_not_ours():
    results = run_ranks(who_job, None, world_size=4, transport="memory")
    assert [result[:2] for result in results] == [(rank, 4) for rank in range(4)]
    assert len({result[2] for result in results}) == 1 and results[0][2] != os.getpid()


def test_workers_keep_their_processes_between_jobs(workers):
    first, second = (workers(2).run(who_job, i) for i in range(2))
    assert [result[2] for result in first] == [result[2] for result in second]
    assert [result[5] for result in second] == [1, 1]


def loaded_job(transport, names):
    return [name in sys.modules for name in names]


def test_ranks_find_modules_loaded_that_were_asked_for_before_they_started():
    names = ["no_such_module", "tabnanny", "sched"]
    assert run_ranks(loaded_job, names, world_size=1) == [[False, False, False]]
    preload("no_such_module", "tabnanny")
    assert run_ranks(loaded_job, names, world_size=2) == [[False, True, False]] * 2


def test_tests_run_with_the_mkl_switch_set_before_torch_was_loaded():
    assert mkl_switch_is_set()


SAYS_IF_SET = "from shardproof.backend.base.mkl import mkl_switch_is_set; print(mkl_switch_is_set())"


def printed(code, mode):
    """What a new interpreter prints with `mode` for `MKL_CBWR`, None for none."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | (
        {"MKL_CBWR": mode} if mode else {}
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.split()


@pytest.mark.parametrize(("mode", "expected"), [(None, "True"), ("AVX2,STRICT", "True"), ("AUTO", "False")])
def test_the_mkl_switch_is_set_before_torch_and_counts_only_when_it_is_strict(mode, expected):
    seen = f"{SAYS_IF_SET}; import os, sys; print('torch' in sys.modules, os.environ['MKL_CBWR'])"
    assert printed(seen, mode) == [expected, "False", mode or mkl_switch()]


def test_the_mkl_switch_does_not_count_when_torch_came_first_unless_the_user_had_set_it():
    """The second time without the variable: torch stays loaded, and the package is loaded anew."""
    again = (
        "import os, importlib, shardproof.backend.base.mkl as mkl; del os.environ['MKL_CBWR']; importlib.reload(mkl)"
    )
    assert printed(f"import torch; {SAYS_IF_SET}; {again}; print(mkl.mkl_switch_is_set())", "AVX2,STRICT") == [
        "True",
        "False",
    ]


# how ranks end


def failing_job(transport, how):
    """Rank 1 ends as `how` says while the others wait for it in a collective."""
    group = transport.group("world", "tp", range(transport.world_size))
    group.barrier()
    if transport.global_rank == 1:
        if how == "raise":
            raise ZeroDivisionError("seven by nothing")
        if how == "user error":
            raise PlanError("a rule is broken.")
        if how == "exit":
            os._exit(3)
        if how == "sys.exit":
            sys.exit(4)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(3600)
    return group.all_gather(torch.ones(3))


LIMIT_S = 3.0
"""Of jobs that never end: longer than their ranks take to come to where they stop, on a very busy machine too."""

NOTICED_S = 60
"""Far below the half hour that gloo waits for a peer that is gone."""


def run_and_fail(transport, how, **options):
    """The RankFailure, the process ids, and the seconds it took."""
    with Workers(3, transport) as workers:
        pids = {result[2] for result in workers.run(who_job)}
        start_s = time.monotonic()
        with pytest.raises(RankFailure) as caught:
            workers.run(failing_job, how, **options)
        elapsed_s = time.monotonic() - start_s
        assert workers.closed
        with pytest.raises(RuntimeError, match="workers are closed"):
            workers.run(who_job)
    assert ended(pids)
    return caught.value, elapsed_s


@pytest.mark.parametrize("transport", ["gloo", "memory"])
@pytest.mark.parametrize(
    ("how", "words", "cause"),
    [
        ("raise", "rank 1 failed: ZeroDivisionError: seven by nothing", ZeroDivisionError),
        ("user error", "rank 1 failed: PlanError: a rule is broken.", PlanError),
        ("sys.exit", "rank 1 failed: SystemExit: 4", SystemExit),
    ],
)
def test_a_rank_that_raises_ends_the_others_and_its_exception_is_the_cause(transport, how, words, cause):
    failure, elapsed_s = run_and_fail(transport, how)
    assert str(failure) == words and failure.global_rank == 1
    assert isinstance(failure.__cause__, cause)
    assert "failing_job" in failure.__notes__[0]  # the traceback of the rank
    assert elapsed_s < NOTICED_S


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "rank 1 ended with exit code 3 before its work was done"),
        ("kill", ("rank 1 was killed by SIGKILL (often the kernel")),
    ],
)
def test_a_rank_that_dies_ends_the_others_and_is_named_with_how_it_ended(how, words):
    failure, elapsed_s = run_and_fail("gloo", how)
    assert words in str(failure) and failure.global_rank == 1
    assert elapsed_s < NOTICED_S


@sampled("transport", ["gloo", "memory"], on_push=1)
def test_a_rank_that_hangs_past_the_time_limit_is_named_with_the_line_it_is_at(transport):
    failure, elapsed_s = run_and_fail(transport, "hang", timeout_s=LIMIT_S)
    assert str(failure).startswith("rank 1 did not finish within 3 s; all ranks were ended.")
    assert "rank 1 is in failing_job (" in str(failure) and "time.sleep(3600)" in str(failure)
    assert "rank 0 waits in all_gather (rank 0, group 'world' over ranks 0, 1, 2)" in str(failure)
    assert failure.global_rank == 1 and elapsed_s < NOTICED_S


def deadlock_job(transport, _):
    channel = transport.channel("0-1", 0, 1)
    group = transport.group("world", "pp", (0, 1))
    if transport.global_rank == 0:
        channel.send(torch.ones(1))
    group.barrier()


@sampled("transport", ["gloo", "memory"], on_push=1)
def test_ranks_that_wait_for_each_other_are_distinguished_from_a_rank_that_hangs(transport):
    with Workers(2, transport) as workers:
        workers.run(who_job)  # so that the time limit is not spent on start-up
        with pytest.raises(RankFailure) as caught:
            workers.run(deadlock_job, timeout_s=LIMIT_S)
    assert caught.value.global_rank is None
    assert "the ranks still wait for each other after 3 s; all ranks were ended." in str(caught.value)
    assert "rank 0 waits in send (rank 0, channel '0-1' from rank 0 to rank 1)" in str(caught.value)
    assert "rank 1 waits in barrier (rank 1, group 'world' over ranks 0, 1)" in str(caught.value)


def test_a_time_limit_that_start_up_uses_up_says_so():
    with pytest.raises(RankFailure, match=r"did not finish within 0\.001 s"):
        run_ranks(failing_job, "hang", world_size=2, timeout_s=0.001)


def test_ranks_that_do_not_begin_in_the_time_of_the_set_up_are_shown_where_they_are():
    with pytest.raises(RankFailure, match=r"no rank has begun its first step 0\.2 s after the start; all ranks were"):
        run_ranks(failing_job, "hang", world_size=2, setup_s=0.2)


def survivor_job(transport, _):
    """Rank 1 goes away quietly; rank 0 returns what its transport says about it."""
    group = transport.group("world", "tp", (0, 1))
    if transport.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_gather(torch.ones(1))
    except TransportError as error:
        print(error, file=sys.stderr, flush=True)
        raise


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_the_first_cause_is_reported_even_when_a_peer_notices_it_first(transport):
    for _ in range(3):
        with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL"):
            run_ranks(survivor_job, world_size=2, transport=transport)


def unpicklable_job(transport, _):
    return (lambda: 0) if transport.global_rank == 1 else 0


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank():
    with pytest.raises(RankFailure, match=r"rank 1 failed: .*pickle"):
        run_ranks(unpicklable_job, world_size=2)


def mismatch_job(transport, _):
    group = transport.group("world", "tp", (0, 1))
    channel = transport.channel("0-1", 0, 1)
    if transport.global_rank == 0:
        channel.send(torch.ones(4))
    else:
        channel.receive((2,), torch.float32)
    group.barrier()


def test_a_message_of_another_shape_is_explained_in_memory():
    with pytest.raises(
        RankFailure,
        match=r"channel '0-1' from rank 0 to rank 1: expects torch.float32 \(2,\), but torch.float32 \(4,\)",
    ):
        run_ranks(mismatch_job, world_size=2, transport="memory")


def other_calls_job(transport, _):
    group = transport.group("world", "tp", (0, 1))
    if transport.global_rank == 0:
        group.barrier()
    else:
        group.all_reduce(torch.ones(1), "sum")


def test_different_collectives_at_one_place_are_explained_in_memory():
    with pytest.raises(RankFailure, match=r"call 1 is (barrier|all_reduce sum) here, but .* elsewhere"):
        run_ranks(other_calls_job, world_size=2, transport="memory")


def test_exit_codes_in_words():
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-signal.SIGABRT) == "was killed by SIGABRT (its last words are above)"


def test_wrong_arguments_are_refused_at_once():
    with pytest.raises(ValueError, match="world_size=0 must be at least 1"):
        Workers(0)
    with pytest.raises(ValueError, match="transport='mpi' is not known"):
        Workers(2, "mpi")


# whole scripts, in interpreters of their own


def run_script(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    command = [sys.executable, "-W", "error", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_a_script_without_a_main_guard_leaves_no_warning_and_never_imports_torch_itself(tmp_path):
    (tmp_path / "jobs.py").write_text("def add(transport, payload):\n    return transport.global_rank + payload\n")
    done = run_script(
        tmp_path,
        """
        import sys
        from jobs import add
        from shardproof.backend.launching.launch import Workers, run_ranks
        print(run_ranks(add, 10, world_size=3), run_ranks(add, 20, world_size=3, transport="memory"))
        forgotten = Workers(2)
        print(forgotten.run(add, 30), "torch" in sys.modules)
        """,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[10, 11, 12] [20, 21, 22]\n[30, 31] False\n", "", 0)


def test_functions_and_classes_of_the_script_itself_are_pickled(tmp_path):
    done = run_script(
        tmp_path,
        """
        from dataclasses import dataclass
        from shardproof.backend.launching.launch import run_ranks

        @dataclass
        class Pair:
            rank: int
            text: str

        def job(transport, payload):
            return Pair(transport.global_rank, payload.text * 2)

        if __name__ == "__main__":
            print(run_ranks(job, Pair(7, "ab"), world_size=2))
        """,
    )
    assert (done.stdout, done.stderr) == ("[Pair(rank=0, text='abab'), Pair(rank=1, text='abab')]\n", "")


def test_a_script_whose_own_functions_are_pickled_is_asked_to_guard_its_main_part(tmp_path):
    done = run_script(
        tmp_path,
        """
        from shardproof.backend.launching.launch import run_ranks
        def job(transport, payload): return payload
        run_ranks(job, 1, world_size=2)
        """,
    )
    assert done.returncode == 1
    assert "put what it does under `if __name__ == '__main__':`" in done.stderr


ENDLESS = """
import os, signal, time
from shardproof.backend.launching.launch import run_ranks
# a job started in the background (`pytest &`) inherits it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
def job(transport, payload):
    with open(f"{payload}/{transport.global_rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(3600)
if __name__ == "__main__":
    run_ranks(job, os.path.dirname(os.path.abspath(__file__)) , world_size=2)
"""


def _pid(path):
    return int(path.read_text() or 0) or None if path.exists() else None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_the_process_that_started_them(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(ENDLESS)
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, env=environment) as process:
        deadline_s = time.monotonic() + 600
        while (
            process.poll() is None
            and time.monotonic() < deadline_s
            and not all(_pid(tmp_path / str(rank)) for rank in range(2))
        ):
            time.sleep(0.05)
        pids = [_pid(tmp_path / str(rank)) for rank in range(2)]
        process.send_signal(number)
        try:
            _, errors = process.communicate(timeout=600)
        finally:
            process.kill()  # else leaving `with` waits for ranks that sleep an hour
    assert None not in pids, errors.decode()
    assert ended(pids)
    deadline_s = time.monotonic() + 600
    # torch's own cache
    while left := [path for path in (tmp_path / "temporary").iterdir() if not path.name.startswith("torchinductor_")]:
        assert time.monotonic() < deadline_s, f"temporary files are left behind: {left}"
        time.sleep(0.05)
    assert number is not signal.SIGINT or b"KeyboardInterrupt" in errors
