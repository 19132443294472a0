"""Start the ranks on this machine, or find those that torchrun or Slurm started; backend, threads and process group."""

# pyright: reportPrivateImportUsage=false
# (torch.distributed does not re-export its documented stores the way that pyright asks for)

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
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

from dtengine.torch_private import agent_processes

LOOPBACK = "127.0.0.1"
TORCHRUN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# What torch says on a rank whose peer went away: a consequence of the failure on another rank.
PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|socket closed|remote process exited|pair closure|"
    r"failed to recv|recvvalue failed",
    re.IGNORECASE,
)
POLL_S = 0.1
SETTLE_S = 2.0  # how long a rank that only lost a peer waits to be blamed, while the culprit may still show

logger = logging.getLogger(__name__)


class StartError(ValueError):
    """A start that cannot succeed: ranks missing, doubled or of another size, a store out of reach, a port in use."""


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


@dataclass(frozen=True)
class RankEnvironment:
    """What the launcher says about this process; launcher is "dtengine", "torchrun" or "slurm"."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str


def launcher_environment(environ: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """Read this process's place among the ranks.

    Args:
        environ: Environment variables. RANK decides for torchrun (or dtengine); without it, a Slurm step of several
            tasks decides for Slurm. A batch script or a one-task step is no launcher.

    Returns:
        The place, or None when no launcher started this process.

    Raises:
        ValueError: Some of torchrun's variables are missing, or the numbers contradict each other.
    """
    names = TORCHRUN_NAMES
    launcher = environ.get("DTENGINE_LAUNCHER", "torchrun")
    if "RANK" not in environ and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_STEP_ID" in environ:
        environ, launcher = export_environment(environ), "slurm"
    present = [name for name in names if name in environ]
    if not set(present) - {"MASTER_ADDR", "MASTER_PORT"}:
        return None
    if missing := [name for name in names if name not in environ]:
        raise ValueError(
            f"{', '.join(missing)}: not set, but {', '.join(present)} are. A launcher sets all of {', '.join(names)}. "
            f"Start with torchrun, or unset {', '.join(present)} to let dtengine start the ranks."
        )
    try:
        rank, local_rank, world_size, local_world_size = (int(environ[name]) for name in names[:4])
    except ValueError:
        shown = ", ".join(f"{name}={environ[name]!r}" for name in names[:4])
        raise ValueError(f"{shown}: all four must be whole numbers. Start with torchrun.") from None
    for name, value, size_name, size in (
        ("RANK", rank, "WORLD_SIZE", world_size),
        ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size),
    ):
        if not 0 <= value < size:
            raise ValueError(
                f"{name}={value}: {size_name}={size}. {name} counts from 0 and must be below {size_name}. "
                f"Start exactly {size} ranks, numbered 0 to {size - 1}."
            )
    return RankEnvironment(rank, local_rank, world_size, local_world_size, launcher)


def export_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Translate a Slurm step's variables into torchrun's; pure, `process_group` puts them into os.environ.

    Args:
        environ: Environment variables of a task that srun started.

    Returns:
        RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. The user's MASTER_* win; else the
        first host of the step (loopback when it has one node) and a port that follows from job and step number.
    """
    size = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    # "2(x3),1" tasks per node -> [2, 2, 2, 1]
    tasks = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    per_node = [int(count) for count, repeat in tasks for _ in range(int(repeat or 1))]
    # "a[03-07,9]b[1-2],c1" -> "a03b1": the comma that ends the first name stands outside every bracket.
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", hosts)
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else "")
    # Below 32768, where Linux begins to hand out ports by itself.
    port = 20000 + (int(environ.get("SLURM_JOB_ID", 0)) * 7 + int(environ.get("SLURM_STEP_ID", 0))) % 12000
    return {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(per_node[int(environ.get("SLURM_NODEID", 0)) % len(per_node)]),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or (LOOPBACK if len(per_node) == 1 or not host else host),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def usable_cores() -> int:
    """Count the cores that this process may use: affinity, and the CPU quota of its cgroups (version 2 or 1)."""
    affinity = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quotas = [affinity]
    with suppress(OSError):
        quotas += _quota_cores(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))
    return max(1, int(min(quotas)))


def _quota_cores(membership: str, root: Path) -> list[float]:
    """Read the CPU quotas, in cores, of the cgroups in /proc/self/cgroup's text and of their parents."""
    cores = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError, ZeroDivisionError):  # absent, or "max": no limit here
                if controllers:
                    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                    quota, period = (int((folder / name).read_text()) for name in names)
                else:
                    quota, period = (int(word) for word in (folder / "cpu.max").read_text().split())
                if quota > 0:
                    cores.append(quota / period)
            if folder == top:
                break
    return cores


def threads_per_rank(local_ranks: int) -> int:
    """Divide the usable cores among this machine's ranks; at least one thread each."""
    return max(1, usable_cores() // local_ranks)


def choose_backend(requested: str | None, local_ranks: int) -> str:
    """Choose the communication backend; never initialises CUDA, so that a fork may follow.

    Args:
        requested: "nccl", "gloo", or None: nccl where each local rank has a GPU of its own, else gloo.
        local_ranks: Ranks on this machine.

    Raises:
        ValueError: An unknown backend, or nccl with fewer GPUs than local ranks.
    """
    if requested not in (None, "nccl", "gloo"):
        raise ValueError(f"--backend {requested}: unknown; known are nccl and gloo. Use one of them, or leave it out.")
    accelerator = torch.accelerator.current_accelerator()
    # device_count asks NVML where it can: no CUDA context, and fork stays possible.
    gpus = torch.accelerator.device_count() if accelerator is not None and accelerator.type == "cuda" else 0
    if requested == "nccl" and (gpus < local_ranks or not dist.is_nccl_available()):
        raise ValueError(
            f"--backend nccl: {local_ranks} ranks on this machine, but {gpus} CUDA GPUs are visible. Each rank needs a "
            f"GPU of its own. Use --backend gloo{f', or start {gpus} ranks' if gpus else ''}."
        )
    return requested or ("nccl" if gpus >= local_ranks and dist.is_nccl_available() else "gloo")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent's forking thread ends (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _lost_peer(error: BaseException | None) -> bool:
    """Tell whether an exception, or one that it came from, only says that another rank went away."""
    while error is not None:
        if isinstance(error, dist.DistError) or PEER_GONE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def report_failure(error: BaseException) -> None:
    """Write an exception to the file that the launcher reads; the first report of a process stands.

    `process_group` calls it before it destroys the group: peers that see the connection close then report later.
    Understood by torchrun too (its TORCHELASTIC_ERROR_FILE).
    """
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if path.exists():
        return
    what = f"{type(error).__name__}: {error}"
    code = error.code if isinstance(error, SystemExit) else 1
    if isinstance(error, SystemExit):
        what = f"left with exit code {code or 0} before the end of its work"
    trace = "".join(traceback.format_exception(error))
    record = {
        "message": {"message": what, "extraInfo": {"py_callstack": trace, "timestamp": str(int(time.time()))}},
        "time_ns": time.time_ns(),
        "exitcode": code if isinstance(code, int) else int(code is not None),
        "user_error": str(error) if isinstance(error, ValueError) else None,
        "lost_peer": _lost_peer(error),
    }
    with suppress(OSError):  # a full disk: the exit code still tells
        path.with_suffix(".part").write_text(json.dumps(record))
        path.with_suffix(".part").rename(path)  # the launcher never reads half a report


def _listen(port: int) -> tuple[int, int]:
    """Bind a loopback socket for a store to take over; return its descriptor and port (a free one for 0)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        port = listener.getsockname()[1]
        return listener.detach(), port


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
        self.listen_fd, port = _listen(0)
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
        try:
            for number in handled:
                signal.signal(number, _raise_signal)
            failed = agent.run().is_failed()  # type: ignore[union-attr]
        except SignalException as interruption:
            raise RunInterrupted(interruption.sigval) from None
        finally:
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
        what = "stopped because another rank failed" if _lost_peer(error) else "failed"
        logger.error("rank %d %s", rank, what, exc_info=error, extra={"file_only": True})
        sys.exit((error.code if isinstance(error, SystemExit) else 1) or 1)


class _FoldEqual(logging.Filter):
    """Let the first of equal messages of a logger ("" for every logger) pass, drop the rest."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.prefix, self.seen = name, set[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "file_only", False) and not self.prefix:
            return False
        message = record.getMessage()
        if not record.name.startswith(self.prefix):
            return True
        fresh = message not in self.seen
        self.seen.add(message)
        return fresh


class _Console(logging.StreamHandler):
    """Write to whatever sys.stderr is at the time: a progress bar replaces it while it runs."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def start_logging(rank: int, log_dir: Path | None) -> None:
    """Send this rank's log lines and Python warnings to log_dir/rank-N.log, and warnings of rank 0 to the terminal.

    Equal Python warnings appear once in a file; equal lines of any kind appear once on the terminal.

    Args:
        rank: This rank.
        log_dir: Folder of the logs, made if missing; None for no file.
    """
    root = logging.getLogger()
    # torch gives many of its loggers a terminal handler each and cuts them from the root: that is for TORCH_LOGS.
    torch_loggers = [one for name, one in logging.root.manager.loggerDict.items() if name.split(".")[0] == "torch"]
    for one in torch_loggers if "TORCH_LOGS" not in os.environ else []:
        if isinstance(one, logging.Logger) and any(type(h) is logging.StreamHandler for h in one.handlers):
            one.handlers, one.propagate = [], True
    root.handlers = [logging.NullHandler()]
    root.setLevel(logging.INFO)
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log_dir / f"rank-{rank}.log")
        file.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
        file.addFilter(_FoldEqual("py.warnings"))
        root.addHandler(file)
    if rank == 0:
        console = _Console()
        console.setLevel(logging.WARNING)
        console.setFormatter(logging.Formatter("rank 0 %(levelname)s: %(message)s"))
        console.addFilter(_FoldEqual())
        root.addHandler(console)
    warnings.formatwarning = lambda text, kind, file, line, source=None: f"{kind.__name__}: {text} ({file}:{line})"
    logging.captureWarnings(True)


@contextmanager
def process_group(
    environment: RankEnvironment, backend: str, timeout_s: float = 60, collective_timeout_s: float | None = None
) -> Iterator[torch.device]:
    """Join the other ranks; yield this rank's device; destroy every process group on the way out.

    Use once per process. An exception that leaves the block is reported to the launcher before the group goes.

    Args:
        environment: This process's place, from `launcher_environment`.
        backend: "nccl" or "gloo", from `choose_backend`.
        timeout_s: Seconds for all ranks to arrive.
        collective_timeout_s: Seconds for one collective; None for torch's default (30 minutes, nccl 10).

    Yields:
        The device of this rank: an accelerator's by local rank for nccl, else the CPU.

    Raises:
        StartError: Ranks are missing after timeout_s, two have one number, or they disagree about WORLD_SIZE; names
            present and absent ranks. Or the store cannot be reached or opened.
    """
    # 1. Meet at the store. 2. Device and group. 3. The caller's block. 4. Report, then destroy.
    for name, value in export_environment().items() if environment.launcher == "slurm" else ():
        os.environ[name] = value
    try:
        deadline = time.monotonic() + timeout_s
        store = _open_store(environment, deadline)
        _meet(store, environment, deadline, timeout_s)
        device, options = torch.device("cpu"), {}
        accelerator = torch.accelerator.current_accelerator()
        if backend == "nccl" and accelerator is not None:
            torch.accelerator.set_device_index(environment.local_rank)
            device = torch.device(accelerator.type, environment.local_rank)
            options["device_id"] = device
        if collective_timeout_s is not None:
            options["timeout"] = timedelta(seconds=collective_timeout_s)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("dtengine", store),
            rank=environment.rank,
            world_size=environment.world_size,
            **options,
        )
        yield device
    except BaseException as error:
        report_failure(error)  # before the destroy below: peers see the connection close only after it
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_store(environment: RankEnvironment, deadline: float) -> dist.TCPStore:
    """Connect to the launcher's store, or to rank 0's where the launcher keeps none (Slurm)."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ours = environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not ours:  # TCPStore's own tries print a C++ stack for each
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise StartError(
                    f"rank {environment.rank}: no store at MASTER_ADDR:MASTER_PORT {host}:{port} ({error}). Rank 0 or "
                    f"its launcher must listen there. Check that rank 0 started, and both variables on every rank."
                ) from None
            time.sleep(0.1)
    try:
        return dist.TCPStore(
            host,
            port,
            environment.world_size,
            is_master=ours,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
            wait_for_workers=False,  # _meet waits, and knows who is missing
            # torch's own socket would listen on every interface.
            master_listen_fd=_listen(port)[0] if ours and host in (LOOPBACK, "localhost") else None,
        )
    except (dist.DistNetworkError, OSError) as error:
        raise StartError(
            f"MASTER_PORT {port}: rank {environment.rank} cannot open a store at {host}:{port} "
            f"({str(error).splitlines()[0]}). The port must be free on rank 0's machine, and only one process may be "
            f"rank 0. Set another MASTER_PORT."
        ) from error


def _meet(store: dist.Store, environment: RankEnvironment, deadline: float, timeout_s: float) -> None:
    """Wait until each rank has signed in once; all ranks leave with one verdict, or raise it."""
    rank, size = environment.rank, environment.world_size
    prefix = f"dtengine/start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"
    verdict, mine = prefix + "verdict", f"{socket.gethostname()}, process {os.getpid()}"
    first = store.compare_set(f"{prefix}present/{rank}", "", mine).decode()
    declared = store.compare_set(prefix + "world_size", "", str(size)).decode()
    if first != mine:
        text = f"RANK {rank}: two processes have it ({first}; {mine}). Each rank needs a number of its own."
        store.compare_set(verdict, "", text + " Start them with one launcher.")
    elif declared != str(size):
        text = f"WORLD_SIZE {size} on rank {rank}: another rank has {declared}. All ranks must agree."
        store.compare_set(verdict, "", text + " Start them with one launcher.")
    elif store.add(prefix + "arrived", 1) == size:
        store.compare_set(verdict, "", "all here")
    while not store.check([verdict]):  # wait() would print a C++ warning when it times out
        if time.monotonic() > deadline:
            here = [r for r in range(size) if store.check([f"{prefix}present/{r}"])]
            who = "; ".join(f"{r} ({store.get(f'{prefix}present/{r}').decode()})" for r in here)
            absent = ", ".join(str(r) for r in range(size) if r not in here)
            text = f"WORLD_SIZE {size}: after {timeout_s:g} s rank {absent} is missing; present: {who}."
            store.compare_set(verdict, "", text + f" All {size} must start. Start the missing ones, or fewer ranks.")
        time.sleep(0.02)
    if (text := store.get(verdict).decode()) != "all here":
        if rank == 0:
            time.sleep(1.0)  # it may hold the store: let the others read the verdict
        raise StartError(text)
