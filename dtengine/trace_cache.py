"""Finished programs kept on disk, so that the next start of the same run need not trace them.

    KEY.json             a line with key and checksum, then the program: nodes, arguments, what is known of each value
    DIGEST.safetensors   the program's constants, by the digest of their content; programs share them

The key is a digest over everything that shapes a program (``program_key``), so nothing is ever looked up by less than all of
it. An entry is text about operators that this module looks up in a list of its own: nothing in it is evaluated, nothing is
unpickled. Whatever is wrong with an entry, it is as if there were none.
"""

import hashlib
import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import fx

from dtengine.describe import Undescribable, digest, sources_digest
from dtengine.mesh import Mesh
from dtengine.passes import PASSES
from dtengine.program_text import Unusable, decode, encode
from dtengine.torch_private import FakeTensorMode

FORMAT = 2  # of entries
SOURCES = sources_digest(Path(__file__).parent)  # when this was imported: what runs, not what the files become later
MOST_BYTES, MOST_FILES = 2 << 30, 4096  # beyond either, what was used longest ago goes
ENTRY = re.compile(r"[0-9a-f]{64}\.(json|safetensors)(\.[0-9.]+\.tmp)?")

logger = logging.getLogger(__name__)


# --- keys -------------------------------------------------------------------------------------------------------


def program_key(facts: Mapping[str, Any]) -> str | None:
    """Return the key of a program, or None where what shapes it cannot be described.

    Args:
        facts: all that shapes it beside the engine, torch, Python and the machine.
    """
    cpu = torch.backends.cpu.get_cpu_capability()
    surroundings = {
        "format": FORMAT,
        "engine": SOURCES,
        "torch": [torch.__version__, torch.version.git_version, torch.version.cuda],
        "python": [platform.python_implementation(), sys.version],
        "machine": [platform.machine(), cpu, torch.backends.mkldnn.is_available()],
        "state": [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()],
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ],
        "passes": PASSES,
    }
    try:
        return digest({**surroundings, **facts})
    except Undescribable as reason:
        _note(f"programs are traced at each start: {reason} has no sound description")
        return None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the cache: $DTENGINE_CACHE, else dtengine in $XDG_CACHE_HOME or ~/.cache.

    None where DTENGINE_CACHE is set to nothing, or there is no home.
    """
    given = environ.get("DTENGINE_CACHE")
    if given is not None:
        return Path(given).absolute() if given else None
    base = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "dtengine"
    except RuntimeError:
        return None


@lru_cache
def _note(text: str) -> None:
    """Log a text once in this process."""
    logger.info("%s", text)


# --- on disk ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceCache:
    """Programs in a folder that is this user's alone; every method does without where something is wrong.

    Attributes:
        folder: made when the first program is stored.
    """

    folder: Path

    def load(self, key: str, mesh: Mesh, device: torch.device, mode: FakeTensorMode) -> fx.GraphModule | None:
        """Return a stored program, its groups and device those of this start; or None."""
        try:
            if not self._is_ours():
                return None
            head, _, body = self._read(f"{key}.json").partition(b"\n")
            if head != _head(key, body):
                return None
            stored = json.loads(body)
            raw = self._read(f"{stored['constants']}.safetensors")
            if hashlib.sha256(raw).hexdigest() != stored["constants"]:
                return None
            names = stored["names"]  # constants of 0 dims, and the devices of all
            values = safetensors.torch.load(raw)
            placed = {n: values[n].to(device if kind != "cpu" else "cpu") for n, kind in names.items()}
            module = decode(stored, placed, mesh, device, mode)
            for name in (f"{key}.json", f"{stored['constants']}.safetensors"):
                with suppress(OSError):
                    os.utime(self.folder / name)  # used just now: the last to be pruned
            return module
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a broken entry makes of the code above, it is no entry
            _note(f"an entry of {self.folder} is not used: {type(error).__name__}: {str(error)[:200]}")
            return None

    def save(self, key: str, module: fx.GraphModule, mesh: Mesh) -> bool:
        """Store a program; returns whether it was."""
        try:
            values = {name: value.detach().cpu().contiguous().clone() for name, value in module.named_buffers()}
            raw = safetensors.torch.save(values)
            stored = encode(module, mesh)
            stored["constants"] = hashlib.sha256(raw).hexdigest()
            stored["names"] = {name: value.device.type for name, value in module.named_buffers()}
            body = json.dumps(stored, separators=(",", ":")).encode()
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours():
                _note(f"{self.folder} may be written by others: programs are not kept there")
                return False
            self._write(f"{stored['constants']}.safetensors", raw)
            self._write(f"{key}.json", _head(key, body) + b"\n" + body)  # last: it names the other
            self._prune()
            return True
        except (OSError, Unusable, KeyError) as error:
            _note(f"a program is not kept in {self.folder}: {error}")
            return False

    def _is_ours(self) -> bool:
        """Whether nobody else may put an entry here."""
        if not hasattr(os, "getuid"):
            return True
        there = self.folder.stat()
        return there.st_uid == os.getuid() and not there.st_mode & 0o022

    def _read(self, name: str) -> bytes:
        path = self.folder / name
        if not ENTRY.fullmatch(name) or not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise FileNotFoundError(name)
        return path.read_bytes()

    def _write(self, name: str, content: bytes) -> None:
        """Publish a file, whole, by renaming it."""
        temporary = self.folder / f"{name}.{os.getpid()}.{time.time_ns()}.tmp"
        try:
            temporary.write_bytes(content)
            os.replace(temporary, self.folder / name)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _prune(self) -> None:
        """Remove what was used longest ago where there is too much; only files that are named like entries."""
        files = sorted(self._files(), reverse=True)
        total = 0
        for count, (_, size, path) in enumerate(files, start=1):
            total += size
            if total > MOST_BYTES or count > MOST_FILES:
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (time of last use, size in bytes, path) of each entry's files."""
        with os.scandir(self.folder) as found:
            for one in found:
                if ENTRY.fullmatch(one.name):
                    with suppress(OSError):
                        there = one.stat(follow_symlinks=False)
                        yield there.st_mtime, there.st_size, Path(one.path)


def _head(key: str, body: bytes) -> bytes:
    return json.dumps({"format": FORMAT, "key": key, "sha256": hashlib.sha256(body).hexdigest()}).encode()
