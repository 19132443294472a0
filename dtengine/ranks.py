"""A rank's surroundings: its place among the ranks, cores and threads, backend, process group."""

# pyright: reportPrivateImportUsage=false
# (torch.distributed does not re-export its documented stores the way that pyright asks for)

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
TORCHRUN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What torch says on a rank whose peer went away: a consequence of the failure on another rank.
PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|socket closed|remote process exited|pair closure|"
    r"failed to recv|recvvalue failed",
    re.IGNORECASE,
)


class StartError(ValueError):
    """A start that cannot succeed: ranks missing, doubled or of another size, a store out of reach, a port in use."""


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
    if "RANK" in environ and "LOCAL_WORLD_SIZE" not in environ and "WORLD_SIZE" in environ:
        # Some launchers leave it out: as many ranks as GPUs here, or all of them.
        environ = {**environ, "LOCAL_WORLD_SIZE": str(torch.accelerator.device_count() or environ["WORLD_SIZE"])}
    launcher = environ.get("DTENGINE_LAUNCHER", "torchrun")
    if "RANK" not in environ and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_STEP_ID" in environ:
        environ, launcher = export_environment(environ), "slurm"
    present = [name for name in names if name in environ and name != "LOCAL_WORLD_SIZE"]
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


def lost_peer(error: BaseException | None) -> bool:
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
        "lost_peer": lost_peer(error),
    }
    with suppress(OSError):  # a full disk: the exit code still tells
        path.with_suffix(".part").write_text(json.dumps(record))
        path.with_suffix(".part").rename(path)  # the launcher never reads half a report


def keep_freed_memory() -> None:
    """Have glibc keep freed memory instead of giving it back and faulting it in again each step (Linux).

    Measured at width 512 on 2 gloo ranks: 12,600 page faults a step before, none after, and a tenth of the step's time.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            libc = ctypes.CDLL(None)
            libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: whose top stays


def listen(port: int) -> tuple[int, int]:
    """Bind a loopback socket for a store to take over; return its descriptor and port (a free one for 0)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        port = listener.getsockname()[1]
        return listener.detach(), port


@contextmanager
def process_group(
    environment: RankEnvironment,
    backend: str,
    timeout_s: float = 60,
    collective_timeout_s: float | None = None,
    agreed: str = "",
) -> Iterator[torch.device]:
    """Join the other ranks; yield this rank's device; destroy every process group on the way out.

    Use once per process. An exception that leaves the block is reported to the launcher before the group goes.

    Args:
        environment: This process's place, from `launcher_environment`.
        backend: "nccl" or "gloo", from `choose_backend`.
        timeout_s: Seconds for all ranks to arrive.
        collective_timeout_s: Seconds for one collective; None for torch's default (30 minutes, nccl 10).
        agreed: What was started, in words; it must be the same on every rank.

    Yields:
        The device of this rank: an accelerator's by local rank for nccl, else the CPU.

    Raises:
        StartError: Ranks are missing after timeout_s, two have one number, or they disagree about WORLD_SIZE or
            `agreed`; names present and absent ranks. Or the store cannot be reached or opened.
    """
    # 1. Meet at the store. 2. Device and group. 3. The caller's block. 4. Report, then destroy.
    for name, value in export_environment().items() if environment.launcher == "slurm" else ():
        os.environ[name] = value
    try:
        deadline = time.monotonic() + timeout_s
        store = _open_store(environment, deadline)
        _meet(store, environment, deadline, timeout_s, agreed)
        device, options = torch.device("cpu"), {}
        accelerator = torch.accelerator.current_accelerator()
        if backend == "nccl" and accelerator is not None:
            torch.accelerator.set_device_index(environment.local_rank)
            device = torch.device(accelerator.type, environment.local_rank)
            options["device_id"] = device
        else:
            keep_freed_memory()
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
            master_listen_fd=listen(port)[0] if ours and host in (LOOPBACK, "localhost") else None,
        )
    except (dist.DistNetworkError, OSError) as error:
        raise StartError(
            f"MASTER_PORT {port}: rank {environment.rank} cannot open a store at {host}:{port} "
            f"({str(error).splitlines()[0]}). The port must be free on rank 0's machine, and only one process may be "
            f"rank 0. Set another MASTER_PORT."
        ) from error


def _meet(store: dist.Store, environment: RankEnvironment, deadline: float, timeout_s: float, agreed: str) -> None:
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
    elif (theirs := store.compare_set(prefix + "agreed", "", agreed).decode()) != agreed:
        text = f"rank {rank}: started with {agreed}, another rank with {theirs}. All ranks must run the same."
        store.compare_set(verdict, "", text + " Give every rank the same command.")
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
