"""dtengine.launch on real processes: starts, failures, signals, what listens, what is left over."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtengine import ranks
from dtengine.ranks import RankEnvironment, choose_backend, export_environment, launcher_environment, threads_per_rank

TARGET = Path(__file__).with_name("launch_target.py")
ROOT = Path(__file__).parents[2]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "node[003-004,9],other",
    "SLURM_JOB_ID": "4711",
}


class Run:
    """One start of the target; every process of it carries a mark in its environment."""

    def __init__(self, case: str, ranks: int, log_dir: Path, **environ: str) -> None:
        self.mark, self.log_dir = uuid.uuid4().hex, log_dir
        scrubbed = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMP_", "GLOO_", "NCCL_"))}
        self.process = subprocess.Popen(
            [sys.executable, str(TARGET), case, str(ranks), str(log_dir)],
            env={**scrubbed, "PYTHONPATH": str(ROOT), "DTENGINE_TEST_MARK": self.mark, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ready(self) -> None:
        assert self.process.stdout is not None
        assert any(line == "ready\n" for line in self.process.stdout), self.process.stderr

    def end(self, timeout: float = 30) -> tuple[int, str, str]:
        """Wait; return exit code, stdout, stderr; whatever happened, nothing may be left 10 s later."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        finally:
            deadline = time.monotonic() + 10
            while self.pids() and time.monotonic() < deadline:
                time.sleep(0.05)
            left = self.pids()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left over: {left}"
        return self.process.returncode, out, err

    def pids(self) -> list[int]:
        """Find the live processes of this start (Linux; elsewhere none is seen)."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[object]:
    started: list[Run] = []

    def start(case: str, ranks: int = 3, **environ: str) -> Run:
        started.append(Run(case, ranks, tmp_path / str(len(started)), **environ))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()


def listeners(pids: list[int]) -> dict[str, int]:
    """Map each local address that one of the processes listens on, as in /proc/net/tcp, to its count."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
            except FileNotFoundError:
                continue
    found: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address = words[1].split(":")[0]
                found[address] = found.get(address, 0) + 1
    return found


# Places and choices: no process started.


def test_no_launcher_is_none() -> None:
    """A plain start, a user's MASTER_ADDR, a batch script and a one-task step are no launcher."""
    assert launcher_environment({}) is None
    assert launcher_environment({"MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None
    assert launcher_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}) is None
    assert launcher_environment({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_torchrun_environment() -> None:
    """torchrun's variables are read, and win over Slurm's; dtengine's own start is told apart."""
    environ = {**SLURM, **TORCHRUN, "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert launcher_environment(environ) == RankEnvironment(3, 1, 4, 2, "torchrun")
    assert launcher_environment({**environ, "DTENGINE_LAUNCHER": "dtengine"}) == RankEnvironment(3, 1, 4, 2, "dtengine")


def test_missing_variables_are_all_named() -> None:
    """Half a launcher's environment is an error that lists every missing name."""
    with pytest.raises(ValueError, match="LOCAL_RANK") as caught:
        launcher_environment({"RANK": "0", "WORLD_SIZE": "4"})
    assert str(caught.value) == (
        "LOCAL_RANK, MASTER_ADDR, MASTER_PORT: not set, but RANK, WORLD_SIZE are. A launcher sets all of RANK, "
        "LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Start with torchrun, or unset RANK, "
        "WORLD_SIZE to let dtengine start the ranks."
    )


@pytest.mark.parametrize("rank", ["4", "-1"])
def test_rank_out_of_range(rank: str) -> None:
    """RANK must be below WORLD_SIZE."""
    with pytest.raises(ValueError, match=f"RANK={rank}: WORLD_SIZE=4. RANK counts from 0"):
        launcher_environment({**TORCHRUN, "RANK": rank, "MASTER_ADDR": "a", "MASTER_PORT": "1"})


def test_slurm_environment() -> None:
    """An srun step is read; the store is at its first host, on a port that follows from the job."""
    assert launcher_environment(SLURM) == RankEnvironment(5, 1, 6, 2, "slurm")
    exported = export_environment(SLURM)
    assert exported["MASTER_ADDR"] == "node003"
    assert exported["MASTER_PORT"] == export_environment({**SLURM, "SLURM_PROCID": "0"})["MASTER_PORT"]
    assert exported["MASTER_PORT"] != export_environment({**SLURM, "SLURM_STEP_ID": "1"})["MASTER_PORT"]
    assert 20000 <= int(exported["MASTER_PORT"]) < 32000
    chosen = export_environment({**SLURM, "MASTER_ADDR": "mine", "MASTER_PORT": "7"})
    assert (chosen["MASTER_ADDR"], chosen["MASTER_PORT"]) == ("mine", "7")


@pytest.mark.parametrize(
    ("hosts", "tasks", "first"),
    [
        ("a[03-07,9]b[1-2],c1", "1(x6)", "a03b1"),
        ("n1,n2", "3,3", "n1"),
        ("gpu-7", "6", "127.0.0.1"),
        ("n[08,10]", "4,2", "n08"),
    ],
)
def test_slurm_first_host(hosts: str, tasks: str, first: str) -> None:
    """The first host of Slurm's bracket form; loopback for one node."""
    environ = {**SLURM, "SLURM_STEP_NODELIST": hosts, "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert export_environment(environ)["MASTER_ADDR"] == first


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores are divided among ranks, at least one each, and never exceed affinity."""
    assert 1 <= ranks.usable_cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(ranks, "usable_cores", lambda: 8)
    assert [threads_per_rank(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_cgroup_quota(tmp_path: Path) -> None:
    """The tightest quota from the group up to the root counts, in both cgroup versions; "max" is none."""
    for path, text in {
        "a/b/cpu.max": "max 100000",
        "a/cpu.max": "250000 100000",
        "cpu,cpuacct/j/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/j/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert ranks._quota_cores("0::/a/b\n", tmp_path) == [2.5]
    assert ranks._quota_cores("4:memory:/j\n3:cpu,cpuacct:/j\n", tmp_path) == [1.5]


def test_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl only where every local rank has a GPU; asking for it elsewhere names --backend."""
    monkeypatch.setattr(ranks.torch.accelerator, "current_accelerator", lambda: ranks.torch.device("cuda"))
    monkeypatch.setattr(ranks.torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(ranks.dist, "is_nccl_available", lambda: True)
    assert [choose_backend(None, n) for n in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert choose_backend("gloo", 2) == "gloo"
    with pytest.raises(ValueError, match="--backend nccl") as caught:
        choose_backend("nccl", 4)
    assert str(caught.value) == (
        "--backend nccl: 4 ranks on this machine, but 2 CUDA GPUs are visible. Each rank needs a GPU of its own. "
        "Use --backend gloo, or start 2 ranks."
    )
    with pytest.raises(ValueError, match="--backend mpi: unknown; known are nccl and gloo"):
        choose_backend("mpi", 1)


# Starts.


def test_two_starts_at_once_of_eight_ranks(runs) -> None:
    """Two launches at once do not collide, and eight ranks join within seconds of the command."""
    began = str(time.time())
    both = [runs("ok", 8, BEGAN=began) for _ in range(2)]
    for run in both:
        code, out, err = run.end()
        assert (code, err) == (0, "")
        assert float(out.split()[1]) < 15


@linux_only
def test_nothing_listens_beyond_loopback(runs) -> None:
    """Launcher and ranks listen on 127.0.0.1 only: the store and gloo's pairs."""
    run = runs("hang")
    run.ready()
    pids = run.pids()
    assert len(pids) == 4
    found = listeners(pids)
    run.process.terminate()
    assert run.end()[0] == 128 + signal.SIGTERM
    assert set(found) == {"0100007F"}
    assert found["0100007F"] >= 4


def test_torchrun_starts_the_same_command(runs, tmp_path: Path) -> None:
    """Under torchrun no ranks are started of our own; the group is torchrun's."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(TARGET), "ok", "9", str(tmp_path / "logs")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "logs").glob("pid-*")) == ["pid-0", "pid-1"]


def test_rank_0_keeps_the_terminal(tmp_path: Path) -> None:
    """Rank 0 writes to the terminal itself, so that a progress bar finds one."""
    ours, theirs = pty.openpty()
    command = [sys.executable, str(TARGET), "ok", "2", str(tmp_path)]
    done = subprocess.run(command, stdout=theirs, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    os.close(theirs)
    assert done.returncode == 0
    assert b" tty True" in os.read(ours, 4096)
    os.close(ours)


def test_restart(runs) -> None:
    """With max_restarts=1, ranks that fail once are started anew on a fresh store and finish."""
    run = runs("restart", 2)
    code, _, err = run.end()
    assert (code, err) == (0, "")
    assert "first attempt" in (run.log_dir / "rank-1.log").read_text()


# Failures: the first failing rank is named, peers that lost it are not.


@pytest.mark.parametrize(
    ("case", "code", "said"),
    [
        ("raise", 1, "FAILED rank 1: ZeroDivisionError: loss is zero on step 20"),
        ("raise-all", 1, "FAILED rank 1: KeyError: 'first'"),
        ("exit3", 3, "FAILED rank 1: left with exit code 3 before the end of its work"),
        ("exit0", 1, "FAILED rank 1: left with exit code 0 before the end of its work"),
        ("os-exit3", 3, "FAILED rank 1: left with exit code 3 before the end of its work"),
        ("os-exit0", 1, "FAILED rank 1: left with exit code 0 before the end of its work"),
        ("kill9", 137, "FAILED rank 1: killed by SIGKILL"),
        ("memory", 1, "FAILED rank 1: RuntimeError: "),
    ],
)
def test_first_failing_rank_is_named(runs, case: str, code: int, said: str) -> None:
    """However rank 1 fails, the last line names it and its log; no other rank is blamed."""
    run = runs(case)
    got, _, err = run.end()
    last = [line for line in err.splitlines() if line.startswith("FAILED")][-1]
    assert (got, last[: len(said)]) == (code, said), err
    assert err.count("Traceback") <= 1
    assert "peer" not in err
    assert str(run.log_dir / "rank-1.log") in err


def test_user_error_is_one_line(runs) -> None:
    """A ValueError on the ranks is one short message and exit code 2."""
    code, _, err = runs("bad-data").end()
    assert (code, err) == (2, "--data x.bin: 3 bytes; a token needs 4. Use another file.\n")


def test_warnings_fold_and_logs_are_complete(runs) -> None:
    """Eight ranks warn 100 times and one raises: a short console with the error, eight complete logs."""
    run = runs("warn", 8)
    code, out, err = run.end()
    assert code == 1
    assert (err.count("the same thing"), err.count("odd gradient")) == (1, 1)
    assert out.splitlines()[1:] == ["printed by 0"]
    assert err.splitlines()[-1].startswith("FAILED rank 1: ZeroDivisionError")
    assert len(err.splitlines()) < 12
    for rank in range(8):
        text = (run.log_dir / f"rank-{rank}.log").read_text()
        assert text.count("the same thing") == 1
        assert re.findall(r"line (\d+)$", text, re.MULTILINE) == [str(i) for i in range(100)]
        assert (f"printed by {rank}" in text) == (rank > 0)


# Signals.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("group", [False, True])
def test_signal_to_the_launcher(runs, number: signal.Signals, group: bool) -> None:
    """A signal to the launcher, or to all as Ctrl-C sends it, ends ranks that are blocked in a collective."""
    run = runs("hang")
    run.ready()
    began = time.monotonic()
    (os.killpg if group else os.kill)(run.process.pid, number)
    code, _, err = run.end(10)
    assert (code, err) == (128 + number, f"stopped by {number.name}\n")
    assert time.monotonic() - began < 5


def test_deaf_ranks_are_killed(runs) -> None:
    """Ranks that ignore the signal are killed after the grace time, second Ctrl-C or not."""
    run = runs("deaf")
    run.ready()
    time.sleep(0.5)
    os.kill(run.process.pid, signal.SIGINT)
    time.sleep(0.5)
    os.kill(run.process.pid, signal.SIGINT)
    code, _, err = run.end(10)
    assert (code, err) == (130, "stopped by SIGINT\n")


@linux_only
def test_launcher_killed(runs) -> None:
    """SIGKILL to the launcher takes the ranks along."""
    run = runs("hang")
    run.ready()
    assert len(run.pids()) == 4
    run.process.kill()
    assert run.end(10)[0] == -signal.SIGKILL


@linux_only
def test_rank_killed_from_outside(runs) -> None:
    """SIGKILL to one rank ends the others, and the message names rank and signal."""
    run = runs("hang")
    run.ready()
    os.kill(int((run.log_dir / "pid-2").read_text()), signal.SIGKILL)
    code, _, err = run.end(10)
    assert code == 137
    assert err.startswith("FAILED rank 2: killed by SIGKILL (log: ")


def test_nohup(runs) -> None:
    """A run started with SIGHUP ignored lives on when the terminal goes."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = runs("hang", 2)
    finally:
        signal.signal(signal.SIGHUP, previous)
    run.ready()
    os.killpg(run.process.pid, signal.SIGHUP)
    time.sleep(0.5)
    assert run.process.poll() is None
    run.process.terminate()
    assert run.end()[0] == 143


# Ranks of another launcher that are missing, doubled or of another size.


def place(rank: int, size: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", "START_TIMEOUT": "8", **{name: str(value) for name, value in names.items()}}


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_missing_rank_is_named(runs, port: int) -> None:
    """Three of four ranks: each fails in time and names who is here and who is not."""
    started = [runs("ok", **{**place(rank, 4, port), "START_TIMEOUT": "5"}) for rank in (0, 1, 3)]
    for run in started:
        code, _, err = run.end()
        assert code == 2
        assert re.fullmatch(
            r"WORLD_SIZE 4: after 5 s rank 2 is missing; present: 0 \(.*\); 1 \(.*\); 3 \(.*\)\. All 4 must start\. "
            r"Start the missing ones, or fewer ranks\.\n",
            err,
        ), err


@pytest.mark.parametrize(
    ("third", "said"),
    [((1, 3), "RANK 1: two processes have it ("), ((2, 4), "another rank has")],
)
def test_contradicting_ranks(runs, port: int, third: tuple[int, int], said: str) -> None:
    """A rank number used twice, or another WORLD_SIZE: every rank says so before the timeout."""
    places = [place(0, 3, port), place(1, 3, port), place(*third, port)]
    for run in [runs("ok", **one) for one in places]:
        code, _, err = run.end()
        assert (code, said in err, len(err.splitlines())) == (2, True, 1), err


def test_port_in_use(runs) -> None:
    """A fixed port that another process holds is named."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        taken = held.getsockname()[1]
        code, _, err = runs("ok", **place(0, 2, taken)).end()
    assert code == 2
    assert err.startswith(f"MASTER_PORT {taken}: rank 0 cannot open a store at 127.0.0.1:{taken} (")
    assert "Address already in use" in err


def test_no_store(runs, port: int) -> None:
    """A rank whose rank 0 never starts says where it looked."""
    code, _, err = runs("ok", **{**place(1, 2, port), "START_TIMEOUT": "1"}).end()
    assert (code, len(err.splitlines())) == (2, 1)
    assert err.startswith(f"rank 1: no store at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port} (")
