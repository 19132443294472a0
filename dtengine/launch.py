"""Start the ranks on this machine, through torch's elastic agent, and end them."""

# pyright: reportPrivateImportUsage=false
# (torch.distributed does not re-export its documented stores the way that pyright asks for)

from __future__ import annotations

import ctypes
import gc
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from dtengine.logs import start_logging
from dtengine.ranks import LOOPBACK, listen, lost_peer, report_failure, threads_per_rank
from dtengine.torch_private import agent_processes

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
POLL_S = 0.1
SETTLE_S = 2.0  # how long a rank that only lost a peer waits to be blamed, while the culprit may still show

logger = logging.getLogger(__name__)


class RankFailed(RuntimeError):
    """The first rank that failed; what other ranks saw afterwards is in their logs.

    Attributes:
        rank: The rank.
        exitcode: Its exit code; -N when signal N killed it, 0 when it left before the end with success.
        error: Its exception as "Type: message", or what became of the process.
        traceback: Its traceback; empty when no Python exception was seen.
        user_error: The message alone when the exception was a ValueError (something a person can fix), else None.
    """

    def __init__(
        self, rank: int, exitcode: int, error: str, traceback: str = "", user_error: str | None = None, where: str = ""
    ) -> None:
        super().__init__(user_error or f"rank {rank}: {error}{where}")
        self.rank, self.exitcode, self.error = rank, exitcode, error
        self.traceback, self.user_error = traceback, user_error

    @property
    def exit_code(self) -> int:
        """Exit code for the command: 2 for a user error, 128 + N for signal N, else the rank's, never 0."""
        if self.user_error is not None:
            return 2
        return 128 - self.exitcode if self.exitcode < 0 else self.exitcode or 1


class RunInterrupted(RuntimeError):
    """A signal ended the launcher; every rank is gone. `exit_code` is 128 + the signal's number."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.signal, self.exit_code = number, 128 + number


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent's forking thread ends (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous of one machine: a TCPStore on a free loopback port, held open from choice to use.

    torch's c10d and static handlers listen on every interface, and c10d unpickles what the store holds.
    """

    def __init__(self) -> None:
        self.run_id = f"{os.getpid()}-{time.time_ns()}"
        self.listen_fd = -1

    @property
    def use_agent_store(self) -> bool:
        """True: ranks connect to this store instead of opening one of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a fresh store; each restart gets its own."""
        self.listen_fd, port = listen(0)
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=self.listen_fd, use_libuv=True
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        return "dtengine-loopback"

    def get_run_id(self) -> str:
        return self.run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class _ErrorFiles(LogsSpecs):
    """One error file per rank and nothing else: ranks write their own logs, no stream passes through the agent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.error.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for rank, env in envs.items():
            self.path(rank).unlink(missing_ok=True)
            env["TORCHELASTIC_ERROR_FILE"] = str(self.path(rank))
        console = dict.fromkeys(envs, "")
        return LogsDest(dict(console), dict(console), error_files={rank: str(self.path(rank)) for rank in envs})


class _Agent(LocalElasticAgent):
    """An elastic agent that finds the rank that failed first.

    torch's own names whichever failed process one poll meets first, compares whole seconds, and waits for ever for a
    rank that left with exit code 0 by os._exit.
    """

    def __init__(self, spec: WorkerSpec, errors: _ErrorFiles, grace_s: float, log_dir: Path | None) -> None:
        super().__init__(spec, errors, start_method="fork", exit_barrier_timeout=grace_s)
        self.errors, self.grace_s, self.log_dir = errors, grace_s, log_dir
        self.failed: RankFailed | None = None
        self._ended: dict[int, tuple[int, int]] = {}  # pid -> time in ns, exit code
        self._first_sign: float | None = None

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:  # type: ignore[override]
        # Signals wait while ranks are forked: a rank inherits Python handlers and would print a traceback from deep
        # inside multiprocessing if its first act were to run one. _run_rank lets them in again.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            super()._initialize_workers(worker_group)  # type: ignore[call-arg]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # type: ignore[override]
        self.failed, self._first_sign = None, None
        return super()._start_workers(worker_group)  # type: ignore[call-arg]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # type: ignore[override]
        # 1. Wait for the next end of a process; note when. 2. Nothing wrong: torch's own check, which ends the run.
        # 3. Something wrong: wait for the culprit if only its victims have shown, then stop all.
        processes = agent_processes(self)
        alive = {p.sentinel: p for p in processes if p.pid not in self._ended}
        for sentinel in multiprocessing.connection.wait(list(alive), timeout=POLL_S):
            process = alive[sentinel]  # type: ignore[index]
            process.join()
            self._ended[process.pid or 0] = (time.time_ns(), process.exitcode or 0)
        failures = sorted(self._failures(processes), key=lambda f: f[0])
        if not failures:
            result: RunResult = super()._monitor_workers(worker_group)  # type: ignore[call-arg]
            for rank, failure in result.failures.items():  # ended since step 1; torch has stopped the others
                self._ended[failure.pid] = (time.time_ns(), failure.exitcode)
                self.failed = min(self._failures(processes), key=lambda f: f[0])[1]
                logger.debug("rank %d ended between two looks", rank)
            return result
        (lost_peer, _), failed = failures[0]
        self._first_sign = self._first_sign or time.monotonic()
        # A rank that reported its exception is given time to end by itself; NCCL may hold it in the teardown.
        waiting = lost_peer or processes[failed.rank].pid not in self._ended
        if waiting and time.monotonic() - self._first_sign < SETTLE_S:
            return RunResult(state=WorkerState.HEALTHY)
        self.failed = failed
        pid = processes[failed.rank].pid or 0
        failure = ProcessFailure(failed.rank, pid, failed.exitcode or 1, str(self.errors.path(failed.rank)))
        return RunResult(state=WorkerState.FAILED, failures={failed.rank: failure})

    def _failures(self, processes: list[Any]) -> Iterator[tuple[tuple[bool, int], RankFailed]]:
        """Yield ((only lost a peer, time), failure) of each rank that reported an exception or ended too soon."""
        for rank, process in enumerate(processes):
            where = f" (log: {self.log_dir / f'rank-{rank}.log'})" if self.log_dir else ""
            ended = self._ended.get(process.pid)
            if self.errors.path(rank).exists():
                report = json.loads(self.errors.path(rank).read_text())
                what, trace = report["message"]["message"], report["message"]["extraInfo"]["py_callstack"]
                code = ended[1] if ended is not None and ended[1] < 0 else report["exitcode"]
                failed = RankFailed(rank, code, what, trace, report["user_error"], where)
                yield (report["lost_peer"], report["time_ns"]), failed
            elif ended is not None:
                # A rank that returned stays until all have: whoever has ended here left, whatever its exit code.
                what = f"left with exit code {ended[1]} before the end of its work"
                if ended[1] < 0:
                    name = next((s.name for s in signal.Signals if s == -ended[1]), f"signal {-ended[1]}")
                    what = f"killed by {name}"
                yield (False, ended[0]), RankFailed(rank, ended[1], what, where=where)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        super()._shutdown(death_sig, min(timeout, self.grace_s))  # type: ignore[arg-type]

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # torch's looks up the host's full name for each event, seconds each where DNS does not answer.
        return Event(f"torchelastic.worker.status.{state}", source=source)


def start_ranks(
    entry: Callable[..., None],
    args: tuple[Any, ...],
    num_ranks: int,
    *,
    log_dir: Path | None,
    max_restarts: int = 0,
    grace_s: float = 5.0,
) -> None:
    """Run `entry(*args)` on ranks forked from this process; return when every rank has returned.

    Call from the main thread, before anything computes with OpenMP or touches CUDA: `fork` shares what is imported.
    Rank 0 keeps the terminal; the others' output goes to their logs, or nowhere without `log_dir`.

    Args:
        entry: What each rank runs. A rank that leaves by SystemExit, of any code, counts as failed.
        args: Its arguments.
        num_ranks: Number of ranks.
        log_dir: Gets rank-N.log of each rank, rank-N.error.json of each exception, and launcher.log; made if missing.
        max_restarts: How often all ranks are started anew after a failure.
        grace_s: Seconds between the signal that ends a rank and SIGKILL.

    Raises:
        RankFailed: A rank failed; the first one. All others are gone.
        RunInterrupted: SIGINT, SIGTERM, SIGHUP or SIGQUIT reached this process. All ranks are gone.
        ValueError: num_ranks is below 1.
    """
    # 1. Check. 2. Take over signals; quiet torch's logs. 3. Run the agent. 4. Leave no process and no handler behind.
    if num_ranks < 1:
        raise ValueError(f"num_ranks {num_ranks}: at least 1 rank must start. Use a mesh of positive sizes.")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("start_ranks: called from a thread; signals and parent-death need the main thread.")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "start_ranks: CUDA is initialised here, and forked ranks could not use it; start ranks first."
        )
    launcher, threads, rendezvous = os.getpid(), threads_per_rank(num_ranks), LoopbackRendezvous()

    def rank_main() -> None:
        os.close(rendezvous.listen_fd)  # or a dead launcher's port would still accept connections
        _run_rank(entry, args, launcher, threads, log_dir)

    children = set(multiprocessing.active_children())
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number in SIGNALS if handlers[number] is not signal.SIG_IGN]  # nohup stays nohup
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in handled)
    folder = nullcontext(log_dir) if log_dir else tempfile.TemporaryDirectory(prefix="dtengine-")
    with folder as errors_dir, _quiet_elastic(log_dir):
        errors = _ErrorFiles(Path(errors_dir))
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_ranks,
            rdzv_handler=rendezvous,
            entrypoint=rank_main,
            max_restarts=max_restarts,
            monitor_interval=0.001,  # _Agent waits by itself
        )
        agent = _Agent(spec, errors, grace_s, log_dir)
        gc.freeze()  # ranks look for garbage among their own objects only, and share the pages of these
        try:
            for number in handled:
                signal.signal(number, _raise_signal)
            failed = agent.run().is_failed()  # type: ignore[union-attr]
        except SignalException as interruption:
            raise RunInterrupted(interruption.sigval) from None
        finally:
            gc.unfreeze()
            for number in handled:
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave ranks
            for child in set(multiprocessing.active_children()) - children:
                child.kill()
                child.join()
            if sys.stdout.isatty():
                print("\x1b[?25h", end="", flush=True)  # a progress bar that was killed leaves the cursor hidden
            for number in handled:
                signal.signal(number, handlers[number])
    if failed:
        raise agent.failed or RankFailed(-1, 1, "a rank failed without a sign")


def _raise_signal(number: int, frame: object) -> None:
    raise SignalException(f"signal {number}", signal.Signals(number))


@contextmanager
def _quiet_elastic(log_dir: Path | None) -> Iterator[None]:
    """Send what torch's launcher logs to launcher.log instead of the terminal."""
    handler: logging.Handler = logging.NullHandler()
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_dir / "launcher.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    with warnings.catch_warnings():
        # From Python 3.12: fork while the store's thread runs; it holds no Python lock.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        for one in loggers:
            one.addHandler(handler)
            one.propagate = False
        try:
            yield
        finally:
            for one in loggers:
                one.removeHandler(handler)
                one.propagate = True
            handler.close()


def _run_rank(
    entry: Callable[..., None], args: tuple[Any, ...], launcher: int, threads: int, log_dir: Path | None
) -> None:
    # 1. Die with the launcher, and of a signal at once: a Python handler would wait for the collective to end.
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    die_with_parent(launcher)
    # 2. Terminal, logs, interfaces, threads.
    rank = int(os.environ["RANK"])
    if rank > 0:
        stream = os.open(
            log_dir / f"rank-{rank}.log" if log_dir else os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        os.close(stream)
    for stdio in (sys.stdout, sys.stderr):
        stdio.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    start_logging(rank, log_dir)
    os.environ["DTENGINE_LAUNCHER"] = "dtengine"
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    # 3. Run; a failure goes to the launcher's file and the log, not to the terminal: the launcher prints one message.
    try:
        entry(*args)
    except BaseException as error:
        report_failure(error)
        what = "stopped because another rank failed" if lost_peer(error) else "failed"
        logger.error("rank %d %s", rank, what, exc_info=error, extra={"file_only": True})
        sys.exit((error.code if isinstance(error, SystemExit) else 1) or 1)
