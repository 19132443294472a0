"""What a person sees of a run: start and end screen, progress, TensorBoard events, status.json.

Only rank 0 makes these. None of it may stop a run that has started: what cannot be written any more is said once in the
log, and training goes on. TensorBoard is imported when events are first written.
"""

import json
import logging
import math
import os
import resource
import sys
import threading
import types
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from dtengine.screens import clean, count_text

STATUSES = ("starting", "running", "saving", "finished", "failed")
STATUS_FIELDS = (
    *("status", "run", "step", "steps", "loss", "heldout_loss", "throughput_samples_per_sec", "tokens_per_sec"),
    *("checkpoint_saved_at", "error", "rank", "world_size", "backend", "mesh", "plan"),
    *("gpu_memory_used_gb", "gpu_memory_total_gb", "loss_scale"),
)
STATUS_INTERVAL_S = 0.25  # between two writes of status.json when only numbers changed
TAGS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "heldout_loss": "heldout/loss",
    "trace_seconds": "start/trace_seconds",
    "step_seconds": "step/seconds",
    "data_wait_seconds": "step/data_wait_seconds",
    "tokens_per_second": "step/tokens_per_second",
    "memory_gb": "step/memory_gb",
}

logger = logging.getLogger(__name__)


# --- facts about this process and small texts ---------------------------------------------------------------------


def memory_gb(device: torch.device | str) -> tuple[float | None, float | None, float]:
    """Measure memory in GB (10^9 bytes).

    Returns:
        (in use on the accelerator by all processes, its total, resident host memory of this process); the first two are
        None for the CPU and for accelerators that do not tell.
    """
    used = total = None
    if torch.device(device).type != "cpu":
        with suppress(RuntimeError, ValueError, AttributeError):
            free, whole = torch.accelerator.get_memory_info(device)
            used, total = (whole - free) / 1e9, whole / 1e9
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # no /proc: the peak instead, which macOS gives in bytes and others in KiB
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return used, total, resident / 1e9


def utc_now() -> str:
    """Return the time as ISO-8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's text so that a reader sees the old or the new one, whole, also when this process is killed.

    It is not forced to the disk: after a power cut either may be gone.

    Raises:
        OSError: the folder is missing, not writable, or full; then the old file is still there.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class Status:
    """The state of a run in one small JSON file for other programs; see STATUS_FIELDS for its keys.

    All keys are always there, None where unknown. A number that is not finite is null, as JSON has no NaN, and ``error``
    says so as long as it lasts. Used by one thread.
    """

    def __init__(self, path: Path, device: torch.device | str = "cpu", **fixed: Any) -> None:
        """Write the file for the first time, with status "starting" unless ``fixed`` says otherwise.

        Args:
            path: status.json; its folder is made if missing.
            device: the accelerator whose memory is shown; "cpu" shows none.
            fixed: fields as in ``update``.
        """
        self.path, self.device = Path(path), device
        self.fields: dict[str, Any] = dict.fromkeys(STATUS_FIELDS) | {"status": "starting"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._merge(fixed)
        self._write()

    def update(self, **fields: Any) -> None:
        """Merge fields and rewrite the file: at once where status, error or checkpoint_saved_at changed, else at most
        four times a second, so that it may be called every step.

        Raises:
            ValueError: a field or a status that there is not.
        """
        before = self._urgent()
        self._merge(fields)
        if self._urgent() == before and monotonic() - self.written < STATUS_INTERVAL_S:
            return
        try:
            self._write()
        except OSError as error:
            logger.warning("%s cannot be written, the run goes on: %s", self.path, error)

    def _merge(self, fields: dict[str, Any]) -> None:
        unknown = [name for name in fields if name not in STATUS_FIELDS]
        if unknown:
            raise ValueError(f"status.json: no field is called {', '.join(unknown)}. Use {', '.join(STATUS_FIELDS)}.")
        if fields.get("status", "starting") not in STATUSES:
            raise ValueError(f"status.json: no status is called {fields['status']!r}. Use {', '.join(STATUSES)}.")
        self.fields |= {name: value.item() if hasattr(value, "item") else value for name, value in fields.items()}

    def _error(self) -> str | None:
        bad = [f"{name} is {value}" for name, value in self.fields.items() if not _finite(value)]
        return "; ".join([str(self.fields["error"])] * bool(self.fields["error"]) + bad) or None

    def _urgent(self) -> tuple[Any, ...]:
        return self.fields["status"], self.fields["checkpoint_saved_at"], self._error()

    def _write(self) -> None:
        self.written = monotonic()
        if torch.device(self.device).type != "cpu":
            self.fields["gpu_memory_used_gb"], self.fields["gpu_memory_total_gb"], _ = memory_gb(self.device)
        values = {name: value if _finite(value) else None for name, value in self.fields.items()}
        values |= {"error": self._error(), "updated_at": utc_now()}
        write_atomically(self.path, json.dumps(values, indent=2, allow_nan=False, default=str) + "\n")


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


class Events:
    """TensorBoard events of a run, which stay one curve for each tag however often the run is killed and resumed."""

    def __init__(self, folder: Path, resume_step: int | None = None, flush_seconds: int = 5) -> None:
        """Open a new event file in the folder of the run.

        Args:
            folder: RUN/tensorboard, the same one on resume; made if missing.
            resume_step: the step (from 1) of the checkpoint that the run goes on from; readers then drop what was
                logged after it. None for a run from its start: they drop all that was there.
            flush_seconds: after how long a watching person sees an event, at the latest.
        """
        self.step = resume_step or 0
        # With tensorflow installed, tensorboard would import it for file names on clouds: seconds, and its warnings.
        # The name is tensorboard's own switch (tensorboard/compat/__init__.py).
        sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from torch.utils.tensorboard import SummaryWriter

        self.summary = Summary
        purge = 0 if resume_step is None else resume_step + 1
        self.writer: SummaryWriter | None = SummaryWriter(
            str(folder), purge_step=purge, max_queue=1000, flush_secs=flush_seconds
        )

    def scalars(self, step: int, **values: float | None) -> None:
        """Log values of a step under their TAGS (other names as they are); None is left out.

        All go into one event, which takes 0.03 ms for eight of them where ``add_scalar`` takes 0.19 ms (2-core CPU).
        """
        summary = self.summary(
            value=[
                self.summary.Value(tag=TAGS.get(name, name), simple_value=float(value))
                for name, value in values.items()
                if value is not None
            ]
        )
        self._write(lambda writer: writer.file_writer.add_summary(summary, step))

    def text(self, name: str, text: str) -> None:
        """Log Markdown at the step that the run started or resumed from."""
        self._write(lambda writer: writer.add_text(name, text, self.step))

    def flush(self) -> None:
        """Wait until all is in the file."""
        self._write(lambda writer: writer.flush())

    def close(self) -> None:
        """Write what is left and close the file."""
        self._write(lambda writer: writer.close())
        self.writer = None

    def _write(self, write: Any) -> None:
        """Write, or give up for good on a full disk: tensorboard's thread has ended then."""
        if self.writer is None:
            return
        try:
            write(self.writer)
        except OSError as error:
            logger.warning("no more TensorBoard events in %s, the run goes on: %s", self.writer.log_dir, error)
            self.writer = None


# --- progress -----------------------------------------------------------------------------------------------------


class Progress:
    """How far a run is: a live bar on a terminal, else whole plain lines for a log.

    Steps count from 1. The bar shows losses to 4 decimals; plain lines show 9 significant digits, which tell any two
    float32 apart, so that two runs can be compared with ``diff``.
    """

    def __init__(self, console: Console, total_steps: int, first_step: int = 1, every_seconds: float = 5.0) -> None:
        """Prepare to show steps first_step to total_steps, a plain line at most every ``every_seconds``."""
        self.console, self.total, self.every = console, total_steps, every_seconds
        self.bar: Bar | None = None
        # FORCE_COLOR makes a file a terminal to rich; a bar in a file is unreadable.
        if console.is_interactive and console.file.isatty():
            self.bar = Bar(
                SpinnerColumn(),
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeRemainingColumn(compact=True, table_column=Column(min_width=5)),
                TextColumn("left"),
                console=console,
                expand=True,
                refresh_per_second=4,
            )
            self.task = self.bar.add_task("", total=total_steps, completed=first_step - 1, figures="starting")
        self.loss: float | None = None
        self.heldout_loss: float | None = None
        self.tokens_per_second = 0.0
        self.first: tuple[int, float] | None = None  # step and time of the first update: that step pays for the trace
        self.printed = -math.inf
        self.warned: set[str] = set()

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show that a step is done."""
        now = monotonic()
        first_step, first_time = self.first = self.first or (step, now)
        self.loss, self.tokens_per_second = loss, tokens_per_second
        if self.bar is not None:
            self.bar.update(self.task, completed=step, figures=self._figures())
        elif step in (first_step, self.total) or now - self.printed >= self.every:
            self.printed = now
            rest = (self.total - step) * (now - first_time) / max(1, step - first_step)
            left = f"  {int(rest) // 3600}:{int(rest) // 60 % 60:02}:{int(rest) % 60:02} left" if rest else ""
            self._line(f"step {step}/{self.total}  loss {loss:#.9g}  {tokens_per_second:,.0f} tokens/s{left}")

    def heldout(self, step: int, loss: float) -> None:
        """Show a held-out loss."""
        self.heldout_loss = loss
        if self.bar is not None:
            self.bar.update(self.task, figures=self._figures())
        else:
            self._line(f"step {step}/{self.total}  held-out loss {loss:#.9g}")

    def note(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self._line(text)

    def warn(self, text: str) -> None:
        """Print a warning; an equal one is not shown again."""
        if text not in self.warned:
            self.warned.add(text)
            self._line(f"warning: {text}", "yellow")

    def _line(self, text: str, style: str = "") -> None:
        shown = Text(clean(text, self.console.encoding), style=style if self.bar is not None else "")
        self.console.print(shown, soft_wrap=True)

    def _figures(self) -> str:
        figures = [] if self.loss is None else [f"loss {self.loss:.4f}"]
        figures += [] if self.heldout_loss is None else [f"held-out {self.heldout_loss:.4f}"]
        figures += [f"{count_text(self.tokens_per_second)} tok/s"] if self.tokens_per_second else []
        return "  ".join(figures)
