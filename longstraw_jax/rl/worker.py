"""A spawned process that runs named functions and is killed when one overruns.

Neither a signal nor a thread stops a computation inside C code (an integer power, a regular expression), and
signals need the main thread; a process can be killed from anywhere. The child is started afresh rather than
forked or re-imported from __main__, so it neither inherits the accelerator nor loads jax.
"""

import contextlib
import importlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from multiprocessing import connection

START_LIMIT_S = 120.0  # starting Python and importing the function's module, on a busy host
ORPHAN_GRACE_S = 2.0
EXIT_GRACE_S = 2.0  # from a child's hanging up to its exit code


class WorkerTimeout(Exception):
    """The function ran past its limit and its process was killed."""


class WorkerError(Exception):
    """The function could not be found, raised, or took its process down.

    Attributes:
        kind: type name of the exception in the child, 'exit' if the process died, 'reply' if another answer than the
            call's own came.
        where: 'file:line' that raised; empty if the process died or another answer came.
    """

    def __init__(self, kind: str, message: str, where: str = ""):
        super().__init__(message)
        self.kind, self.where = kind, where


class Worker:
    """One child process, started at the first call and again after it was killed.

    Calls from several threads take turns. Arguments and results travel as pickles, with the call's number and the
    child's process id: a function that forks, or writes where it should not, must not answer for another call.
    """

    def __init__(self, memory_bytes: int | None = None):
        """Args: memory_bytes: limit of the child's address space; None leaves it alone."""
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._process = self._link = self._end = None

    def call(self, function: str, *args, timeout_s: float):
        """Runs a function of the child and returns its result.

        Args:
            function: 'module:name'; the child imports the module with this process's sys.path.
            *args: picklable positional arguments.
            timeout_s: seconds from the moment the module is imported and the arguments are there.

        Raises:
            WorkerTimeout: the limit passed; the child is dead.
            WorkerError: anything else that kept the function from returning.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()  # died between calls
            if self._process is None:
                self._start()
            try:
                number = next(self._numbers)
                self._link.send((number, function, args, timeout_s))
                kind, value = self._receive(number, START_LIMIT_S)
                if kind == "running":
                    kind, value = self._receive(number, timeout_s)
            except (EOFError, OSError):
                process = self._process
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(EXIT_GRACE_S)  # else the code told would be that of our own kill
                self._stop()
                raise WorkerError("exit", f"its process ended with code {process.returncode}") from None
            except BaseException:  # a limit that passed, or an interrupt: the reply must not meet the next call
                self._stop()
                raise
        if kind == "returned":
            return value
        raise WorkerError(kind, *value)

    def close(self):
        """Ends the child; a later call starts another."""
        with self._lock:
            if self._process is not None:
                self._stop()

    def _start(self):
        ours, theirs = connection.Pipe()
        command = f"from longstraw_jax.rl.worker import serve; serve({theirs.fileno()}, {self._memory_bytes})"
        # The working folder last: a script's own folder stands for it in sys.path.
        path = os.pathsep.join([*(entry or os.getcwd() for entry in sys.path), os.getcwd()])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", command],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent; and a kill reaches the child's own children
        )
        theirs.close()
        self._link = ours
        self._end = weakref.finalize(self, _end, self._process, ours)

    def _receive(self, number, limit_s):
        if not self._link.poll(limit_s):
            raise WorkerTimeout(f"no result within {limit_s:g} s")
        try:
            found, pid, kind, value = self._link.recv()
        except (EOFError, OSError):
            raise
        except Exception as error:
            raise WorkerError("reply", f"its process sent no answer that can be read: {error}") from error
        if (found, pid) != (number, self._process.pid):
            told = f"an answer to call {found} of process {pid}; accepted: to call {number} of {self._process.pid}"
            raise WorkerError("reply", f"{told} (the function must not go on in a forked process)")
        return kind, value

    def _stop(self):
        self._end()
        self._process = self._link = self._end = None


def _end(process, link):
    """Kills the child and what it started, and collects it."""
    link.close()
    if process.poll() is None:  # once collected, its number may be another's
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def serve(descriptor: int, memory_bytes: int | None) -> None:
    """The child's loop: calls functions as they are named, until the parent hangs up."""
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    link = connection.Connection(descriptor)
    own = os.getpid()
    while os.getpid() == own:  # a fork of a function ends with its answer, which the parent refuses
        try:
            number, name, args, timeout_s = link.recv()
        except (EOFError, OSError):
            return
        try:
            function = resolve(name)
            link.send((number, own, "running", None))
            # The default action of the alarm ends the process from the kernel: a child whose parent was
            # killed does not compute for ever.
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_GRACE_S)
            try:
                result = function(*args)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            link.send((number, os.getpid(), "returned", result))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(where.filename)}:{where.lineno}"
            link.send((number, os.getpid(), type(error).__name__, (str(error), place)))


def resolve(name: str):
    """The callable that 'module:name' stands for.

    Raises:
        ValueError: not of that form, no such module or name, or not callable.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{name!r} is not of the form 'module:function'")
    try:
        function = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"{name!r} is of type {type(function).__name__}, no function")
    return function
