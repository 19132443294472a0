"""Checkpoints: logical tensors by name and global shape, in safetensors files that any mesh can read.

    step-100/manifest.json              what there is: tensors, their slices, files and sizes, and facts of the run
    step-100/rank-00000.safetensors     the slices that rank 0 owns, under the tensors' names

Each rank writes what it owns once, without a gather; of replicas the first writes. The folder is staged under another
name and published by one rename, so a folder called step-N is complete.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dtengine import random
from dtengine.layout import Placements, local_bounds
from dtengine.loss_scale import LossScale
from dtengine.mesh import Mesh
from dtengine.model import Param
from dtengine.optimizer import Optimizer
from dtengine.shard import bounds_of
from dtengine.state import State
from dtengine.torch_private import all_gather_flat

FORMAT = 1
_CURE = "Move it away to go on from the one before it, or to start anew."
MANIFEST = "manifest.json"
_DTYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Slice(NamedTuple):
    """The part [start, stop) of a tensor, one pair for each dim, and the file that holds it."""

    file: str
    bounds: tuple[tuple[int, int], ...]


class Stored(NamedTuple):
    """A tensor of a checkpoint: its dtype as safetensors names it, its global shape, and where its parts are."""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]


class Manifest(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        step: updates done.
        facts: of the run: plan, mesh, consumed sequences, fingerprint of the data, ...
        tensors: {name: Stored}.
        files: {file: (bytes, CRC-32 of its content)}.
    """

    step: int
    facts: dict[str, Any]
    tensors: dict[str, Stored]
    files: dict[str, tuple[int, int]]


def save(folder: Path, state: State, mesh: Mesh, facts: Mapping[str, Any], borrowed: Collection[str] = ()) -> Path:
    """Write a checkpoint; a call that all ranks make together.

    Args:
        folder: where the checkpoints of the run are.
        state: to save.
        mesh: of the state.
        facts: plain values for the manifest.
        borrowed: parameters that an earlier stage of a pipeline saves.

    Returns:
        The published folder, folder/step-N. One that is already there is left as it is.

    Raises:
        RuntimeError: on all ranks alike, where replicas do not hold the same bits: of replicas only the first is
            written, and ranks that drift apart train different models.
    """
    # 1. stage: each rank its file; 2. the first rank adds the manifest; 3. publish by one rename
    if state.scale is not None:
        facts = {**facts, "loss_scale": LossScale(*state.scale.tolist())._asdict()}
    target, staging = folder / f"step-{state.step}", folder / f".staging-step-{state.step}"
    rank = dist.get_rank()
    if target.exists():
        return target
    if not replicas_equal(state, mesh):
        raise RuntimeError(
            f"checkpoint {target}: replicas of a parameter differ between ranks; they must be bit-equal. Nothing was "
            "saved. A model function may depend on its rank: prove it with dtengine.verify."
        )
    if rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    dist.barrier()
    skipped = {f"params.{n}" for n in borrowed} | {f"slots.{s}.{n}" for n in borrowed for s in state.slots[n]}
    named = {n: x for n, x in _named(state).items() if n not in skipped}
    owned = {
        name: x.to_local().detach().cpu().contiguous()
        for name, x in named.items()
        if x.to_local().numel() and _owner(tuple(x.placements), mesh.coordinate)
    }
    path = staging / _file(rank)
    save_file(owned, path)
    _sync(path)
    stage, stages = (0, 1) if mesh.pipe is None else (mesh.pipe.rank, mesh.pipe.size)
    if not any(mesh.coordinate):  # the first rank of each stage describes it
        described = {name: _stored(x, mesh, stage * mesh.num_ranks) for name, x in named.items()}
        (staging / _part(stage)).write_text(json.dumps(described))
    sums = [checksum(path)] if mesh.everyone is None else _gather_numbers(checksum(path), mesh)

    if rank == 0:
        tensors: dict[str, dict[str, Any]] = {}
        for number in range(stages):
            tensors |= json.loads((staging / _part(number)).read_text())
        files = sorted({s["file"] for t in tensors.values() for s in t["slices"]})
        manifest = {
            "format": FORMAT,
            "step": state.step,
            "facts": dict(facts),
            "files": {f: [(staging / f).stat().st_size, sums[int(f[5:10])]] for f in files},
            "tensors": tensors,
        }
        for spare in set(os.listdir(staging)) - set(files):  # descriptions, and files of ranks that own nothing
            (staging / spare).unlink()
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _sync(staging / MANIFEST)
        _sync(staging)
        staging.rename(target)
        _sync(folder)
    dist.barrier()
    return target


def newest(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Find the newest checkpoint of a run that verifies.

    Returns:
        (its folder or None, {newer ones that do not verify: why}).

    Raises:
        ValueError: there are checkpoints, and none of them verifies.
    """
    steps = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match:
            steps.append((int(match[1]), path))
    damaged: dict[Path, str] = {}
    for _, path in sorted(steps, reverse=True):
        try:
            read_manifest(path, contents=True)
            return path, damaged
        except ValueError as error:
            damaged[path] = str(error)
    if damaged:
        raise ValueError("\n".join(damaged.values()))
    return None, {}


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file's content."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value


def read_manifest(path: Path, *, contents: bool = False) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Args:
        path: a folder step-N.
        contents: read every file as well and compare its checksum.

    Raises:
        ValueError: it is missing or malformed, a file is missing, of another size or content, or a name leads elsewhere.
    """
    try:
        raw = json.loads((path / MANIFEST).read_text())
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']}, this version reads {FORMAT}")
        tensors = {
            name: Stored(
                t["dtype"],
                tuple(int(s) for s in t["shape"]),
                tuple(Slice(s["file"], tuple((int(a), int(b)) for a, b in s["bounds"])) for s in t["slices"]),
            )
            for name, t in raw["tensors"].items()
        }
        files = {name: (int(size), int(crc)) for name, (size, crc) in raw["files"].items()}
        manifest = Manifest(int(raw["step"]), dict(raw["facts"]), tensors, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"checkpoint {path}: its manifest cannot be read ({error}). {_CURE}") from error
    problems = []
    for name in sorted({s.file for t in tensors.values() for s in t.slices} | set(files)):
        if not re.fullmatch(r"rank-\d{5}\.safetensors", name):
            problems.append(f"{name!r} is no name of a file in it")
        elif not (path / name).is_file():
            problems.append(f"{name} is missing")
        elif name not in files:
            problems.append(f"{name} is not among its files")
        elif (path / name).stat().st_size != files[name][0]:
            problems.append(f"{name} has {(path / name).stat().st_size} bytes, not {files[name][0]}")
        elif contents and checksum(path / name) != files[name][1]:
            problems.append(f"{name} is damaged: its checksum differs")
    if problems:
        raise ValueError(f"checkpoint {path}: {'; '.join(problems)}. {_CURE}")
    return manifest


def load(path: Path, state: State, mesh: Mesh) -> State:
    """Fill a state from a checkpoint, whatever mesh, plan and 16-bit precision wrote it.

    Each rank reads only the slices it needs. Where the state has a master, it and its cast are filled from the same
    numbers. fp16's loss scale comes from the checkpoint's facts; one of another precision has none, and the state keeps
    its own.

    Args:
        path: a folder step-N.
        state: gives names, shapes and layouts; its tensors are overwritten.
        mesh: of the state.

    Raises:
        ValueError: names, shapes or dtypes differ (every difference is listed), or a file is damaged.
    """
    manifest = read_manifest(path)
    named = _named(state)
    expected = {name: (tuple(x.shape), x.dtype) for name, x in named.items()}
    if mesh.pipe is not None:  # of other stages nothing is known here
        own = {*state.params, *state.buffers}
        manifest = manifest._replace(tensors={n: t for n, t in manifest.tensors.items() if _of(n) in own})
    check_fits(path, manifest, expected)
    files: dict[str, Any] = {}
    try:
        for name, x in named.items():
            bounds = bounds_of(x.shape, tuple(x.placements), mesh)
            _fill(x.to_local(), bounds, name, manifest.tensors[name], path, files)
        for name, x in state.params.items() if state.master else ():
            bounds = bounds_of(x.shape, tuple(x.placements), mesh)
            _fill(x.to_local(), bounds, f"params.{name}", manifest.tensors[f"params.{name}"], path, files)
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        raise ValueError(f"checkpoint {path}: damaged ({error}). {_CURE}") from error
    stored = manifest.facts.get("loss_scale")
    if state.scale is not None and stored is not None:
        state.scale.copy_(torch.tensor(LossScale(**stored)))
    return state._replace(step=manifest.step)


def read_whole(path: Path | str) -> dict[str, Tensor]:
    """Read a checkpoint's tensors whole, on the CPU: "params.NAME", "slots.SLOT.NAME" of the optimizer, "buffers.NAME".

    Raises:
        ValueError: a file is missing or damaged.
    """
    path = Path(path)
    files: dict[str, Any] = {}
    whole = {}
    for name, stored in read_manifest(path, contents=True).tensors.items():
        whole[name] = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
        _fill(whole[name], [(0, size) for size in stored.shape], name, stored, path, files)
    return whole


def check_fits(path: Path, manifest: Manifest, expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Raise ValueError, listing every difference, where a checkpoint's names, shapes and dtypes are not as expected."""
    differences = [f"{name} is missing" for name in expected if name not in manifest.tensors]
    differences += [f"{name} is not in the model" for name in manifest.tensors if name not in expected]
    for name, (shape, dtype) in expected.items():
        stored = manifest.tensors.get(name)
        if stored is not None and stored.shape != shape:
            differences.append(f"{name} has shape {list(stored.shape)}, the model {list(shape)}")
        if stored is not None and _DTYPES.get(stored.dtype) != dtype:
            differences.append(f"{name} has dtype {stored.dtype}, the run {_NAMES[dtype]}")
    names = [line.split()[0] for line in differences]
    if differences and all(name.startswith("slots.") for name in names):
        raise ValueError(
            f"checkpoint {path}: its optimizer state is of another --optimizer: {len(names)} tensors differ, such as "
            f"{names[0]}. Resume with the optimizer of the run that wrote it, or begin a new run."
        )
    if differences:
        raise ValueError(
            f"checkpoint {path}: does not fit the model: {'; '.join(differences)}. Resume with the options of the run "
            "that wrote it."
        )


def _fill(
    local: Tensor, bounds: list[tuple[int, int]], name: str, stored: Stored, path: Path, files: dict[str, Any]
) -> None:
    """Copy the parts of a stored tensor that lie within ``bounds`` into a local shard."""
    filled = 0
    with torch.no_grad():
        for part in stored.slices:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, part.bounds, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            if part.file not in files:
                files[part.file] = safe_open(path / part.file, framework="pt")
            source = files[part.file].get_slice(name)
            there = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, part.bounds, strict=True))
            here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, bounds, strict=True))
            piece = source[there] if there else files[part.file].get_tensor(name)
            local[here].copy_(piece)
            filled += piece.numel()
    if filled != local.numel():
        raise ValueError(
            f"checkpoint {path}: {name} has {filled} of the {local.numel()} elements that this rank needs."
        )


def replicas_equal(state: State, mesh: Mesh) -> bool:
    """Whether all ranks that hold the same shard of parameters, slots and buffers hold the same bits, said by all alike.

    Collectives:
        One small all-gather over each mesh axis that replicates something, and one over the mesh.
    """
    tensors = [*state.params.values(), *_named(state).values()]
    equal = True
    for axis, name in enumerate(mesh.axes):
        if mesh.sizes[name] == 1:
            continue
        sums = [_bit_sum(x) for x in tensors if isinstance(x.placements[axis], Replicate)]
        if sums:
            mine = torch.stack(sums)
            everywhere = all_gather_flat(mine, mesh.sizes[name], mesh.groups[(name,)]).view(mesh.sizes[name], -1)
            equal &= bool((everywhere == everywhere[0]).all())
    if mesh.pipe is not None:
        equal &= _stages_agree(state, mesh)
    verdict = torch.tensor([float(not equal)])
    if mesh.everyone is not None:
        verdict = all_gather_flat(verdict, mesh.world, mesh.everyone)
    return not verdict.any().item()


def _stages_agree(state: State, mesh: Mesh) -> bool:
    """Whether tensors that several stages of a pipeline hold have the same bits in all of them."""
    assert mesh.pipe is not None
    named = {**{f"stored.{n}": x for n, x in state.params.items()}, **_named(state)}
    mine = [[random.key(name), int(_bit_sum(x))] for name, x in named.items()]
    count = torch.tensor([len(mine)], dtype=torch.int64)
    most = int(all_gather_flat(count, mesh.pipe.size, mesh.pipe.group).max())
    padded = torch.tensor([*mine, *[[0, 0]] * (most - len(mine))], dtype=torch.int64).view(most, 2)
    sums: dict[int, int] = {}
    rows = all_gather_flat(padded, mesh.pipe.size, mesh.pipe.group).view(-1, 2).tolist()
    return all(sums.setdefault(name, bits) == bits for name, bits in rows)


def _bit_sum(x: DTensor) -> Tensor:
    """Hash the bits of a local shard to an int64."""
    local = x.to_local().detach().contiguous().flatten()
    bits = local.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[local.element_size()]).to(torch.int64)
    return random.bits(bits, torch.arange(len(bits))).sum()


def tensor_shapes(params: Mapping[str, Param], optimizer: Optimizer) -> dict[str, tuple[int, ...]]:
    """Return {name in a checkpoint: global shape} of all parameters and their optimizer slots."""
    shapes = {f"params.{name}": param.shape for name, param in params.items()}
    for name, param in params.items():
        shapes |= {f"slots.{slot}.{name}": one.shape for slot, one in optimizer.slots(param).items()}
    return shapes


def _gather_numbers(number: int, mesh: Mesh) -> list[int]:
    """Return every rank's number."""
    mine = torch.tensor([number], dtype=torch.int64, device=mesh.device_mesh.device_type)
    assert mesh.everyone is not None
    return all_gather_flat(mine, mesh.world, mesh.everyone).tolist()


def _named(state: State) -> dict[str, DTensor]:
    """Return {name in a checkpoint: tensor}; parameters in full precision, as every plan and precision reads them."""
    named = {f"params.{name}": x for name, x in state.weights.items()}
    for name, slots in state.slots.items():
        named |= {f"slots.{slot}.{name}": x for slot, x in slots.items()}
    return named | {f"buffers.{name}": x for name, x in state.buffers.items()}


def _of(name: str) -> str:
    """Return the parameter or buffer that a tensor of a checkpoint is of."""
    return name.split(".", 2 if name.startswith("slots.") else 1)[-1]


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _owner(placements: Placements, coordinate: tuple[int, ...]) -> bool:
    """Whether a rank is the first of those that hold the same shard."""
    return not any(isinstance(p, Replicate) and c for p, c in zip(placements, coordinate, strict=True))


def _ranks(mesh: Mesh) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (rank, coordinate) of all ranks, in rank order."""
    yield from enumerate(product(*(range(size) for size in mesh.sizes.values())))


def _part(stage: int) -> str:
    return f"stage-{stage:05d}.json"


def _stored(x: DTensor, mesh: Mesh, first: int) -> dict[str, Any]:
    """Describe for the manifest where every part of a tensor is written, from its layout alone; ``first`` is the first rank
    of its stage."""
    placements, sizes = tuple(x.placements), tuple(mesh.sizes.values())
    slices = []
    for rank, coordinate in _ranks(mesh):
        bounds = tuple(local_bounds(x.shape, placements, sizes, coordinate))
        if _owner(placements, coordinate) and all(start < stop for start, stop in bounds):
            slices.append({"file": _file(first + rank), "bounds": bounds})
    return {"dtype": _NAMES[x.dtype], "shape": tuple(x.shape), "slices": slices}


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
