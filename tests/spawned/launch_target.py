"""What the launch tests run: `python launch_target.py CASE RANKS LOG_DIR`, a command in the shape of dtengine.train."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from dtengine.launch import RankFailed, RunInterrupted, start_ranks
from dtengine.logs import start_logging
from dtengine.ranks import choose_backend, launcher_environment, process_group

BEGAN = time.time()
logger = logging.getLogger(__name__)


def work(case: str, log_dir: Path) -> None:
    """Join, then do what the case says; every case but "ok" ends with ranks blocked in a collective."""
    environment = launcher_environment()
    assert environment is not None
    rank, size = environment.rank, environment.world_size
    if environment.launcher != "dtengine":
        start_logging(rank, log_dir)
    if case == "bad-data":
        raise ValueError("--data x.bin: 3 bytes; a token needs 4. Use another file.")
    if case == "restart" and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise OSError("first attempt")
    timeout_s = float(os.environ.get("START_TIMEOUT", "20"))
    with process_group(environment, choose_backend("gloo", environment.local_world_size), timeout_s) as device:
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        assert total.item() == size
        joined = torch.tensor([time.time()], dtype=torch.float64)
        dist.all_reduce(joined, dist.ReduceOp.MAX)
        if rank == 0:
            age = time.time() - float(os.environ.get("BEGAN", BEGAN))
            print(f"joined {age:.2f} s threads {torch.get_num_threads()} tty {sys.stdout.isatty()}", flush=True)
        (log_dir / f"pid-{rank}").write_text(str(os.getpid()))
        dist.barrier()
        if case == "deaf":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        if case in ("hang", "deaf"):
            print("ready", flush=True)
        if case == "warn":
            for i in range(100):
                warnings.warn("the same thing", stacklevel=1)
                logger.warning("odd gradient")
                logger.info("line %d", i)
            print(f"printed by {rank}", flush=True)
        if case == "warn" and rank == 1:
            raise ZeroDivisionError("loss is zero on step 20")
        if case in ("ok", "restart"):
            return
        if rank == 1:
            time.sleep(0.3)
            if case == "raise":
                raise ZeroDivisionError("loss is zero on step 20")
            if case == "raise-all":
                raise KeyError("first")
            if case == "exit3":
                sys.exit(3)
            if case == "exit0":
                sys.exit(0)
            if case == "os-exit0":
                os._exit(0)
            if case == "os-exit3":
                os._exit(3)
            if case == "kill9":
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "memory":
                resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
                torch.ones(2**31)
        if case == "raise-all":
            time.sleep(0.35)
            raise KeyError(f"later on {rank}")
        dist.barrier() if rank != 1 else time.sleep(60)


def main() -> int:
    case, ranks, log_dir = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    log_dir.mkdir(parents=True, exist_ok=True)
    try:
        if launcher_environment() is not None:
            work(case, log_dir)
        else:
            start_ranks(work, (case, log_dir), ranks, log_dir=log_dir, max_restarts=case == "restart", grace_s=3)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except RankFailed as failed:
        print(failed if failed.user_error else f"{failed.traceback}FAILED {failed}", file=sys.stderr)
        return failed.exit_code
    except RunInterrupted as interrupted:
        print(interrupted, file=sys.stderr)
        return interrupted.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
