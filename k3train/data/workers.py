"""Processes that share out jobs: started bare, talked to in lines of JSON, gone when their parent is. Imports no JAX.

They are no children of ``multiprocessing``: a training process that prepares its data has threads and devices, which no
fork survives, and a worker whose parent was killed must not go on writing.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import k3train
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode

Job = dict[str, Any]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Context manager: ``count`` processes, or this one where ``count`` is 1.

    Args:
      count: processes.
      setup: what each is told at the start (``data/worker.py``).
      here: does a job in this process.
      command: what they work for, to be named where one dies.
      kept: what is not lost then and what to do; a clause.
    """

    def __init__(
        self,
        count: int,
        setup: dict[str, Any],
        here: Callable[[Job], Any],
        command: str = "data prepare",
        kept: str = "What was tokenized is kept: run it again and it goes on there",
    ):
        self._here, self._command, self._kept = here, command, kept
        self._processes = [_start(setup) for _ in range(count)] if count > 1 else []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                # Closing flushes, which a pipe without a reader refuses.
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def map(self, jobs: list[Job]) -> Iterator[tuple[int, Any]]:
        """(number, result) of the jobs as they end.

        A result that is a dict with a true ``stop`` lets the jobs that were begun end, and begins no more. Jobs begin
        in their order, so the first failure of all is among the results.

        Raises:
          UserError: of the earliest job that failed, after all that were begun have ended; a worker died.
        """
        if not self._processes:
            for number, job in enumerate(jobs):
                result = self._here(job)
                yield number, result
                if isinstance(result, dict) and result.get("stop"):
                    return
            return
        messages: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        numbers, lock, stopped = iter(range(len(jobs))), threading.Lock(), threading.Event()

        def serve(process: subprocess.Popen[str]) -> None:
            while not stopped.is_set():
                with lock:
                    number = next(numbers, None)
                if number is None:
                    break
                answer = _ask(process, jobs[number])
                if "failure" in answer or (isinstance(answer["result"], dict) and answer["result"].get("stop")):
                    stopped.set()
                messages.put((number, answer))
            messages.put(None)

        for process in self._processes:
            threading.Thread(target=serve, args=(process,), daemon=True).start()
        failures: dict[int, Any] = {}
        serving = len(self._processes)
        while serving:
            message = messages.get()
            if message is None:
                serving -= 1
            elif "failure" in message[1]:
                failures[message[0]] = message[1]["failure"]
            else:
                yield message[0], message[1]["result"]
        if failures:
            self._raise(failures[min(failures)])

    def _raise(self, failure: dict[str, Any]) -> None:
        match failure["kind"]:
            case "user":
                raise UserError(failure["message"], ExitCode(failure["code"]))
            case "os":
                raise OSError(failure["errno"], failure["message"], failure["path"])
            case "died":
                status = failure["status"]
                how = f"was killed by signal {-status} (out of memory?)" if status < 0 else f"ended with {status}"
                raise UserError(
                    f"a worker of {self._command} {how}. {self._kept}, with fewer data.source.workers if the memory "
                    "was too small"
                )
            case _:
                raise RuntimeError(f"a worker of {self._command} failed:\n{failure['message']}")


def _start(setup: dict[str, Any]) -> subprocess.Popen[str]:
    home = str(Path(k3train.__file__).parent.parent)
    paths = os.pathsep.join(path for path in (home, os.environ.get("PYTHONPATH", "")) if path)
    # One thread each: the cores are shared out already.
    environment = os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "k3train.data.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment,
        # A Ctrl-C is for the parent, which ends its workers.
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # one that died at once is found out by the first job
        process.stdin.write(json.dumps(setup) + "\n")
        process.stdin.flush()
    return process


def _ask(process: subprocess.Popen[str], job: Job) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if line:
            return json.loads(line)
    return {"failure": {"kind": "died", "status": process.wait()}}
