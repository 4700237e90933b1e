"""SIGINT and SIGTERM end a program in one line, with a shell's exit code, wherever its main thread is."""

import signal
import subprocess
import sys

import pytest

PRELUDE = """
import atexit, contextlib, ctypes, os, signal, sys, threading, time
from shardproof.core.commands.cli import run_program
# a job started in the background (`pytest &`) inherits it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
@contextlib.contextmanager
def something():
    try:
        yield
    finally:
        time.sleep(0.3)
        print("closed", flush=True)

def ready():
    print("ready", flush=True)

def run():
    atexit.register(lambda: print("left", flush=True))
    with something():
{body}
sys.exit(run_program("program", run))
"""


def ended_by(body: str, *signals: signal.Signals) -> tuple[int, str, str]:
    """Exit code, output and errors of a program that runs `body` and gets signals when it says `ready`, and
    again when it says more."""
    indented = "".join(f"        {line}\n" for line in body.strip().splitlines())
    program = PRELUDE.replace("{body}", indented)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        read = ""
        for number in signals:
            read += process.stdout.readline()
            process.send_signal(number)
        try:
            out, err = process.communicate(timeout=600)
        finally:
            process.kill()
    return process.returncode, read + out, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_is_open_is_closed_then_one_line_and_the_exit_code_of_shells(number, code):
    assert ended_by("ready(); time.sleep(60)", number) == (
        code,
        "ready\nclosed\nleft\n",
        (f"program: ended by {number.name}.\n"),
    )


def test_a_second_signal_does_not_interrupt_what_the_first_has_closed():
    body = (
        "with contextlib.ExitStack() as stack: stack.callback(time.sleep, 0.5); stack.callback(ready); ready(); "
        "time.sleep(60)"
    )
    assert ended_by(body, signal.SIGINT, signal.SIGTERM) == (
        130,
        "ready\nready\nclosed\nleft\n",
        ("program: ended by SIGINT.\n"),
    )


def test_a_main_thread_that_does_not_come_back_from_a_library_is_left_behind():
    """The second lock of a mutex waits for ever, and no signal ends it, as a collective that peers have left."""
    body = """
mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
library.pthread_mutex_lock(mutex)
place = hex(ctypes.addressof(mutex))
def tell_when_locked():
    while place not in open(f"/proc/self/task/{os.getpid()}/syscall").read():
        time.sleep(0.01)
    ready()
threading.Thread(target=tell_when_locked, daemon=True).start()
library.pthread_mutex_lock(mutex)
"""
    assert ended_by(body, signal.SIGTERM) == (143, "ready\n", "program: ended by SIGTERM.\n")


def test_a_signal_that_a_library_has_swallowed_or_renamed_counts_all_the_same():
    renamed = """
try:
    ready(); time.sleep(60)
except BaseException:
    raise ImportError("cannot load")
"""
    assert ended_by(renamed, signal.SIGINT) == (130, "ready\nclosed\nleft\n", "program: ended by SIGINT.\n")
    swallowed = """
with contextlib.suppress(BaseException):
    ready(); time.sleep(60)
ready(); time.sleep(60)
"""
    assert ended_by(swallowed, signal.SIGTERM, signal.SIGINT)[::2] == (130, "program: ended by SIGINT.\n")


def test_a_thread_that_python_waits_for_does_not_keep_an_ended_program():
    """As a pool's that works for a collective: 20 s are long for a test, so the wait is made shorter
    where it is looked up."""
    body = (
        "from shardproof.core.base import interrupts; interrupts.UNWIND_S = "
        "3.0\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
    )
    assert ended_by(f"{body}ready(); time.sleep(60)", signal.SIGTERM) == (
        143,
        "ready\nclosed\n",
        ("program: ended by SIGTERM.\n"),
    )


def test_a_signal_that_another_thread_is_given_interrupts_the_main_thread():
    body = """
other = threading.Thread(target=time.sleep, args=(60,), daemon=True)
other.start()
threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGTERM)).start()
time.sleep(60)
"""
    assert ended_by(body) == (143, "closed\nleft\n", "program: ended by SIGTERM.\n")


def test_one_rank_of_a_host_reports_it(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ended_by("ready(); time.sleep(60)", signal.SIGTERM) == (143, "ready\nclosed\nleft\n", "")


def test_signals_that_are_ignored_stay_so():
    body = "signal.getsignal(signal.SIGINT); ready(); time.sleep(0.2); print('went on', flush=True); return 0"
    program = PRELUDE.replace(
        "signal.signal(signal.SIGINT, signal.default_int_handler)", "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    )
    command = [sys.executable, "-c", program.replace("{body}", f"        {body}")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=600)[0] == "went on\nclosed\nleft\n" and process.returncode == 0


SEARCHES = """
import signal, sys
from shardproof.core.commands.cli import main
from shardproof.simulator import plan_cli
signal.signal(signal.SIGINT, signal.default_int_handler)
def search(*given, real=plan_cli.search, **named):
    print("ready", flush=True)
    return real(*given, **named)
plan_cli.search = search
sys.exit(main())
"""


def test_plan_ends_so_while_it_searches():
    options = ["--cluster", "dgx-h100", "--devices", "1024", "--global-batch", "1024", "--sequence", "8192"]
    command = [sys.executable, "-c", SEARCHES, "plan", "--model", "llama3-70b", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert (process.communicate(timeout=6000)[1], process.returncode) == (
            ("shardproof plan: ended by SIGINT.\n"),
            130,
        )
