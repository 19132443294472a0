"""Logs by rank: every rank its own file, warnings once on the terminal."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path


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
