"""The killable worker: results, failures, limits, restarts."""

import os
import subprocess
import sys
import threading
import time
from multiprocessing import connection

import pytest

from longstraw_jax.rl.worker import Worker, WorkerError, WorkerTimeout


def loads_jax():
    import longstraw_jax.rl.rewards  # noqa: F401

    return "jax" in sys.modules, os.environ["JAX_PLATFORMS"]


def spin(size):
    return 9**9**size  # one C call that holds the interpreter lock: neither threads nor handlers run


def forks(value):
    os.fork()  # and both sides return
    return value


def meddles(value):
    """Writes a message of its own to every connection of the process."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            connection.Connection(descriptor).send(("returned", value))
        except OSError:
            pass


@pytest.fixture(scope="module")
def worker():
    child = Worker(memory_bytes=2 << 30)
    yield child
    child.close()


def test_returns_results_from_another_process(worker):
    pid = worker.call("os:getpid", timeout_s=5)
    assert pid != os.getpid() and worker.call("os:getpid", timeout_s=5) == pid


def test_a_module_in_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "lone_module.py").write_text("def one():\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    child = Worker()
    assert child.call("lone_module:one", timeout_s=60) == 1
    child.close()


def test_the_child_does_not_load_jax(worker):
    assert worker.call(f"{__name__}:loads_jax", timeout_s=60) == (False, "cpu")


def test_failures_carry_their_type_and_place(worker):
    with pytest.raises(WorkerError, match="invalid literal") as error:
        worker.call("builtins:int", "x", timeout_s=5)
    assert error.value.kind == "ValueError" and "worker.py" in error.value.where
    with pytest.raises(WorkerError, match="no_such_module"):
        worker.call("no_such_module:f", timeout_s=5)
    with pytest.raises(WorkerError, match="is not of the form 'module:function'"):
        worker.call("os", timeout_s=5)
    assert worker.call("builtins:len", "abc", timeout_s=5) == 3


def test_a_result_that_cannot_travel_is_an_error(worker):
    with pytest.raises(WorkerError, match="pickle"):
        worker.call("threading:Lock", timeout_s=5)
    assert worker.call("builtins:len", "abc", timeout_s=5) == 3


def test_an_overrun_is_killed_and_the_next_call_works(worker):
    pid = worker.call("os:getpid", timeout_s=5)
    began = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"no result within 0\.5 s"):
        worker.call(f"{__name__}:spin", 9, timeout_s=0.5)
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert worker.call("os:getpid", timeout_s=5) not in (pid, os.getpid())


def test_a_child_that_dies_is_an_error_and_is_replaced(worker):
    with pytest.raises(WorkerError, match="ended with code 3") as error:
        worker.call("os:_exit", 3, timeout_s=5)
    assert error.value.kind == "exit"
    assert worker.call("builtins:len", "abc", timeout_s=5) == 3


def test_a_function_that_forks_is_refused_and_never_answers_for_another_call(worker):
    with pytest.raises(WorkerError, match=r"answer to call \d+ of process \d+; accepted: ") as error:
        for value in range(50):  # which side answers first is open: the other's answer meets the next call
            assert worker.call(f"{__name__}:forks", value, timeout_s=20) == value
    assert error.value.kind == "reply"
    assert [worker.call("builtins:abs", n, timeout_s=5) for n in range(4)] == [0, 1, 2, 3]


def test_a_function_that_writes_to_the_link_is_refused(worker):
    with pytest.raises(WorkerError, match="no answer that can be read"):
        worker.call(f"{__name__}:meddles", 1, timeout_s=20)
    assert worker.call("builtins:abs", -1, timeout_s=5) == 1


@pytest.mark.parametrize("code", [0, 5])
def test_an_exit_is_told_with_its_own_code(worker, code):
    with pytest.raises(WorkerError, match=f"its process ended with code {code}$"):
        worker.call("sys:exit", code, timeout_s=5)


def test_memory_is_limited(worker):
    with pytest.raises(WorkerError) as error:
        worker.call("builtins:bytearray", 3 << 30, timeout_s=20)
    assert error.value.kind == "MemoryError"


def test_threads_take_turns(worker):
    got = {}
    threads = [
        threading.Thread(target=lambda n=n: got.update({n: worker.call("builtins:abs", -n, timeout_s=5)}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {n: n for n in range(8)}


def test_a_worker_that_is_forgotten_ends_its_child():
    child = Worker()
    pid = child.call("os:getpid", timeout_s=5)
    del child
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_whose_parent_was_killed_ends_by_itself(tmp_path):
    note = tmp_path / "pid"
    program = f"""
import os, threading, time
from longstraw_jax.rl.worker import Worker
child = Worker()
open({str(note)!r}, "w").write(str(child.call("os:getpid", timeout_s=5)))
threading.Timer(0.5, os._exit, [0]).start()
child.call({f"{__name__}:spin"!r}, 9, timeout_s=1.0)
"""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, check=True)
    pid = int(note.read_text())
    assert _alive(pid)
    deadline = time.monotonic() + 20
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(pid)


def _alive(pid):
    """Whether the process still computes (one that nobody collects stays in the table as a zombie)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
