"""A pool of gloo ranks for tests: processes started once, many cases sent to them.

    def sums(rank: int, x: float) -> float:            # a module-level function of a test file
        total = torch.tensor([x * rank]); dist.all_reduce(total); return total.item()

    assert pool.run(4, sums, 2.0) == [12.0] * 4

A forkserver imports torch and dtengine once and never computes, so the ranks that are forked from it start in
milliseconds and inherit no OpenMP thread. Ranks talk to the test by pipes, and die with it on every path: a thread of
each waits for the end of the test process, and the kernel kills a rank when the forkserver ends.
"""

# pyright: reportPrivateImportUsage=false
# (torch.distributed does not re-export its documented stores the way that pyright asks for)

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from dtengine.launch import die_with_parent
from dtengine.model import BUILT_IN
from dtengine.ranks import LOOPBACK, listen, lost_peer

# Imported once, by the forkserver: what a rank, its first trace and the test files need.
MODELS = [f"dtengine.models.{name}" for name in BUILT_IN]
PRELOAD = ["torch._dynamo", "dtengine.verify", *MODELS, "pytest", "hypothesis"]
START_S = 120.0  # for all ranks to be there, on a busy machine
FRESH_AFTER = 50  # cases: torch's caches keep some meshes, and with them groups, threads and descriptors (10 a case)
GRACE_S = 15.0  # for the other ranks to answer once one has failed: they see its connections close


class RankError(AssertionError):
    """A function failed on a rank, or the ranks did not answer in time; holds the rank's own traceback.

    Attributes:
        rank: the rank that failed first; -1 where none is to blame.
        errors: {rank: "Type: message"} of every rank that raised.
    """

    def __init__(self, message: str, rank: int = -1, errors: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.rank, self.errors = rank, errors or {}


class Pool:
    """Rank processes that wait for work; a context manager.

    Args:
        size: largest number of ranks of a case.
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self.starts = 0  # how often processes were started: at first, every FRESH_AFTER cases, after a hang or a death
        self.cases = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(rank, *args, **kwargs)`` on ranks 0..num_ranks-1 of a fresh process group.

        Args:
            num_ranks: ranks that take part; the others stay idle.
            function: a module-level function; it and its arguments are pickled, and so is what it returns.
            timeout_s: seconds for all ranks to answer; then all processes are killed, and the next case gets new ones.

        Returns:
            What each rank returned.

        Raises:
            RankError: a rank raised (any other than a mere loss of a peer first), died, or did not answer.
            ValueError: more ranks than the pool has.
        """
        # 1. Send. 2. Collect answers until all came, time is over or a process died. 3. Replace hung ranks. 4. Judge.
        if not 1 <= num_ranks <= self.size:
            raise ValueError(f"num_ranks {num_ranks}: the pool has {self.size} ranks. Use 1 to {self.size}.")
        if self.cases % FRESH_AFTER == 0:
            self.close()
        if not self._processes:
            self._start()
        self.cases += 1
        work = pickle.dumps((function, args, kwargs))
        pipes = self._pipes[:num_ranks]
        answers: dict[int, tuple[bool, Any]] = {}
        died: list[int] = []
        deadline = time.monotonic() + timeout_s
        try:
            for pipe in pipes:
                pipe.send((num_ranks, self.cases, list(sys.path), work, timeout_s))
            while len(answers) + len(died) < num_ranks and (left := deadline - time.monotonic()) > 0:
                waiting = {p: r for r, p in enumerate(pipes) if r not in answers and r not in died}
                for pipe in wait(list(waiting), left):
                    rank = waiting[pipe]  # type: ignore[index]
                    try:
                        answers[rank] = pickle.loads(pipes[rank].recv_bytes())
                    except (EOFError, ConnectionResetError):
                        died.append(rank)
                    if rank in died or not answers[rank][0]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        except BaseException:  # Ctrl-C, or pytest-timeout: the ranks are in the midst of something
            self.close()
            raise
        silent = [r for r in range(num_ranks) if r not in answers]
        codes = []
        if silent:
            for rank in died:
                self._processes[rank].join(5)
                codes.append(f"rank {rank} with exit code {self._processes[rank].exitcode}")
            self.close()
        failed = {r: value for r, (good, value) in answers.items() if not good}
        if not failed and not silent:
            return [answers[r][1] for r in range(num_ranks)]
        return _raise(function, failed, codes, [r for r in silent if r not in died], timeout_s)

    def close(self) -> None:
        """Kill the processes; a later ``run`` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.starts += 1
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, theirs), name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            if not self._pipes[0].poll(START_S):
                raise RankError(f"the pool's ranks did not start within {START_S:g} s")
            port = self._pipes[0].recv()
        except BaseException:
            self.close()
            raise
        for pipe in self._pipes[1:]:
            pipe.send(port)


def _raise(
    function: Callable[..., Any],
    failed: dict[int, tuple[str, str, bool]],
    died: list[str],
    hung: list[int],
    limit: float,
) -> list[Any]:
    """Raise RankError for what went wrong; a rank that only lost a peer is a consequence."""
    errors = {r: error for r, (error, _, _) in failed.items()}
    causes = [r for r in failed if not failed[r][2]] or ([] if died else list(failed))
    parts = [f"rank {causes[0]} raised {errors[causes[0]]}"] if causes else []
    parts += [f"died: {', '.join(died)}"] if died else []
    parts += [f"no answer within {limit:g} s (or {GRACE_S:g} s after a failure) from ranks {hung}"] if hung else []
    others = {r: e for r, e in errors.items() if r not in causes[:1]}
    text = f"{function.__name__}: {'; '.join(parts)}" + "".join(f"\n  rank {r}: {e}" for r, e in others.items())
    if causes:
        text += f"\n\n--- rank {causes[0]} ---\n{failed[causes[0]][1]}"
    raise RankError(text, causes[0] if causes else -1, errors)


# --- in a rank's process ----------------------------------------------------------------------------------------------


def _die_with_test() -> None:
    """Wait for the end of the test process; the forkserver lives as long as its ranks, and would keep them."""
    test = multiprocessing.parent_process()
    assert test is not None
    wait([test.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _rank_main(rank: int, pipe: Connection) -> None:
    die_with_parent(os.getppid())
    threading.Thread(target=_die_with_test, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's, which kills its ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is never garbage: a collection then takes milliseconds
    descriptor, port = listen(0) if rank == 0 else (None, 0)
    if rank:
        port = pipe.recv()
    store = dist.TCPStore(
        LOOPBACK, port, is_master=rank == 0, wait_for_workers=False, master_listen_fd=descriptor,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    if rank == 0:
        pipe.send(port)
    while True:
        try:
            num_ranks, case, path, work, timeout_s = pipe.recv()
        except EOFError:
            os._exit(0)
        sys.path[:] = path  # test files are imported by the folder that pytest put there
        try:
            answer = (True, _case(rank, num_ranks, dist.PrefixStore(f"case-{case}", store), work, timeout_s))
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            answer = (False, (text, "".join(traceback.format_exception(error)), lost_peer(error)))
        try:
            data = pickle.dumps(answer)  # not pipe.send: torch would share the memory of tensors instead of copying it
        except Exception as error:
            text = f"the answer cannot be pickled: {type(error).__name__}: {error}"
            data = pickle.dumps((False, (text, text, False)))
        pipe.send_bytes(data)


def _case(rank: int, num_ranks: int, store: dist.Store, work: bytes, timeout_s: float) -> Any:
    """Run one case in a process group of its own, warnings as errors; no group is left afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function, args, kwargs = pickle.loads(work)  # from our own test process, by a pipe
        # A collective that hangs raises before the pool loses patience, and then says where.
        timeout = timedelta(seconds=max(1.0, timeout_s / 2))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        try:
            return function(rank, *args, **kwargs)
        finally:
            dist.destroy_process_group()
            gc.collect()  # steps and their graphs are cycles, which hold groups
