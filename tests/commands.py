"""Run dtengine's commands as a person does: another process, with a time limit, and nothing left over.

    done = run("dtengine.train", "--mesh 2x2 --steps 6", cwd=tmp_path)  # python -m dtengine.train ...
    assert (done.code, done.err) == (0, "")

``WarmCommands`` does the same for many short commands, and imports torch once.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

MARK = "DTENGINE_TEST_MARK"
SCRUBBED = ("SLURM_", "TORCHELASTIC_", "OMP_", "GLOO_", "NCCL_", "DTENGINE_", "MASTER_")
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FORCE_COLOR", "COLUMNS")


class Done(NamedTuple):
    """How a command ended: exit code (-N for signal N), what it wrote, and the seconds it took.

    From ``WarmCommands`` the seconds are of CPU time: a busy machine does not make a command slow.
    """

    code: int
    out: str
    err: str
    seconds: float


def environment(extra: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return this process's environment without what a launcher or a terminal set in it, and no cache of programs."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(SCRUBBED) and k not in LAUNCHERS}
    return {**kept, "DTENGINE_CACHE": "", **extra}


def words(arguments: str | Sequence[str]) -> list[str]:
    return shlex.split(arguments) if isinstance(arguments, str) else list(arguments)


class Command:
    """One start of ``python -m MODULE ARGUMENTS`` in a session of its own; all its processes carry a mark.

    A context manager: what still runs at its end is killed.

    Args:
        module: "dtengine.train".
        arguments: one shell-quoted string, or a list of words.
        cwd: the folder it starts in.
        launcher: words before ``-m MODULE``, as ["-m", "torch.distributed.run", "--nproc-per-node", "2"].
        environ: further environment variables.
    """

    def __init__(
        self,
        module: str,
        arguments: str | Sequence[str],
        cwd: Path,
        launcher: Sequence[str] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.mark, self.began = uuid.uuid4().hex, time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "-m", module, *words(arguments)],
            cwd=cwd,
            env=environment({MARK: self.mark, **environ}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids():
            kill(pid)
        self.process.communicate()

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

    def until(self, ready: Callable[[], object], what: str, timeout: float = 150) -> None:
        """Wait until ``ready()`` is true; fail where the command ends before that."""
        deadline = time.monotonic() + timeout
        while not ready():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                done = self.end(1)
                raise AssertionError(f"no {what}: {done}")
            time.sleep(0.02)

    def end(self, timeout: float = 150) -> Done:
        """Wait for the end, and assert that no process is left 10 s after it."""
        left: list[int] = []
        try:
            out, err = self.process.communicate(timeout=timeout)
            seconds = time.monotonic() - self.began
        except subprocess.TimeoutExpired:
            for pid in self.pids():
                kill(pid)
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {timeout} s:\n{out}\n{err}") from None
        finally:
            deadline = time.monotonic() + 10
            while (left := self.pids()) and time.monotonic() < deadline:
                time.sleep(0.05)
            for pid in left:
                kill(pid)
        assert not left, f"left over: {left}"
        return Done(self.process.returncode, out, err, seconds)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run(
    module: str,
    arguments: str | Sequence[str],
    cwd: Path,
    launcher: Sequence[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
    timeout: float = 200,
) -> Done:
    """Start a command as ``Command`` does and wait for its end."""
    with Command(module, arguments, cwd, launcher, environ) as command:
        return command.end(timeout)


class WarmCommands:
    """Commands that are forked from a process which has imported torch and dtengine; a context manager.

    Each is a process of its own and runs the module's ``main`` as ``python -m`` does. Only the import is shared.
    """

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()

    def run(self, module: str, arguments: str | Sequence[str], cwd: Path, timeout: float = 120) -> Done:
        """Run a command; one that does not end in time is killed with all it started, and that is an AssertionError."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([module, words(arguments), str(cwd), timeout]), file=self.process.stdin, flush=True)
        reply = json.loads(self.process.stdout.readline())
        done = Done(*reply[:4])
        assert not reply[4], f"still running after {timeout} s: {done}"
        return done


def serve() -> None:
    """Answer the lines that WarmCommands sends; ends with its standard input."""
    for module in ("dtengine.train", "dtengine.verify", "dtengine.models.gpt", "dtengine.models.llama"):
        importlib.import_module(module)
    for line in sys.stdin:
        module, arguments, cwd, timeout = json.loads(line)
        files = [os.memfd_create(name) for name in ("out", "err")]
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _become(module, arguments, cwd, files)
        late = False
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() - began > timeout and not late:
                late = True
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.005)
        _, status, used = os.wait4(pid, 0)
        seconds = used.ru_utime + used.ru_stime
        texts = []
        for file in files:
            os.lseek(file, 0, os.SEEK_SET)
            with open(file, encoding="utf-8", errors="replace") as stream:
                texts.append(stream.read())
        print(json.dumps([os.waitstatus_to_exitcode(status), *texts, seconds, late]), flush=True)


def _become(module: str, arguments: list[str], cwd: str, files: list[int]) -> None:
    """Run a command in this forked process and leave it."""
    code: object = 1
    try:
        os.setsid()
        os.chdir(cwd)
        null = os.open(os.devnull, os.O_RDONLY)
        for file, stream in zip([null, *files], (0, 1, 2), strict=True):
            os.dup2(file, stream)
        sys.argv = [f"{module}.py", *arguments]
        code = importlib.import_module(module).main(arguments)
    except SystemExit as leave:
        code = leave.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve()
