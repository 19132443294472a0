"""Pictures of a simulated schedule: SVG, PNG, and the trace format of Chrome, which Perfetto opens.

Written without a library for drawing: a picture is a list of boxes with a short text each.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from dtengine.pipeline.actions import Schedule
from dtengine.pipeline.simulate import Simulation

COLORS = {"F": "#7aa6d8", "I": "#e8a87c", "W": "#8fbf8f", "B": "#d98080"}
LEGEND = {"F": "F forward", "I": "I input gradient", "W": "W weight gradient", "B": "B both"}
LIGHTER = 0.35  # of the way to white, for each further stage of a rank
ROW, MARGIN, NAME = 26, 14, 62  # pixels
WIDTH = (480, 3600)  # of the time axis, least and most
SIGNATURE = b"\x89PNG\r\n\x1a\n"
LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ-.,:/%_()"
DOTS = (  # of each letter five rows of three dots, a row an octal digit
    "75557262277174771717557117471774757711227575775717257556565634443655567464774644345535575572227111525565544447"
    "577556555525552656442556365655342167222255557555525577555255552227124700700000020002402020112445124500007"
    "1222142224"
)
FONT = {letter: DOTS[5 * k : 5 * k + 5] for k, letter in enumerate(LETTERS)}


class Box(NamedTuple):
    """A rectangle in pixels, or with no color only its text."""

    x: float
    y: float
    width: float
    height: float
    color: str | None
    text: str


def draw(schedule: Schedule, simulation: Simulation) -> tuple[int, int, list[Box]]:
    """Lay a schedule out: time to the right, a row for each rank, in each box the number of the microbatch.

    Returns:
        (width, height, boxes).
    """
    shortest = min((e.end - e.start for row in simulation.events for e in row if e.end > e.start), default=1.0)
    total = max(simulation.makespan, shortest)
    length = min(max(16 * total / shortest, WIDTH[0]), WIDTH[1])
    title = f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches, "
    title += f"time {simulation.makespan:.6g}, bubble {simulation.bubble_share:.1%}"
    boxes = [Box(MARGIN, MARGIN, 0, 14, None, title)]
    top = MARGIN + 24
    for rank, events in enumerate(simulation.events):
        y, stages = top + rank * ROW, schedule.stages(rank)
        boxes.append(Box(MARGIN, y, 0, ROW - 4, None, f"rank {rank}"))
        boxes.append(Box(MARGIN + NAME, y, length, ROW - 4, "#eeeeee", ""))
        for action, start, end in events:
            color = _lighter(COLORS[action.kind], LIGHTER * stages.index(action.stage))
            x, width = MARGIN + NAME + length * start / total, length * (end - start) / total
            boxes.append(Box(x, y, width, ROW - 4, color, str(action.microbatch)))
    y = top + schedule.num_ranks * ROW + 6
    for k, (kind, text) in enumerate(LEGEND.items()):
        boxes.append(Box(MARGIN + NAME + 170 * k, y, 14, 14, COLORS[kind], ""))
        boxes.append(Box(MARGIN + NAME + 170 * k + 18, y, 0, 14, None, text))
    return round(length) + 2 * MARGIN + NAME, y + 14 + MARGIN, boxes


def svg(schedule: Schedule, simulation: Simulation) -> str:
    """Return a picture as SVG."""
    width, height, boxes = draw(schedule, simulation)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for x, y, w, h, color, text in boxes:
        if color:
            lines.append(
                f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{h}" fill="{color}" stroke="#fff" stroke-width="0.5"/>'
            )
        if text and not (color and 6.5 * len(text) > w):
            at, anchor = (x + w / 2, ' text-anchor="middle"') if color else (x, "")
            lines.append(f'<text x="{at:.2f}" y="{y + h / 2 + 4}"{anchor}>{escape(text)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def png(schedule: Schedule, simulation: Simulation) -> bytes:
    """Return the same picture as PNG, with a palette."""
    width, height, boxes = draw(schedule, simulation)
    palette = list(dict.fromkeys(["#ffffff", "#202020", *(box.color for box in boxes if box.color)]))
    rows = [bytearray(width) for _ in range(height)]

    def fill(x: float, y: float, w: float, h: float, color: int) -> None:
        left, right = max(0, round(x)), min(width, round(x + w))
        if right > left:
            for row in rows[max(0, round(y)) : max(0, round(y + h))]:
                row[left:right] = bytes([color]) * (right - left)

    for x, y, w, h, color, text in boxes:
        if color:
            fill(x, y, max(1.0, w - 0.5), h, palette.index(color))
        size = 8 * len(text) - 2
        if text and not (color and size + 2 > w):
            left = x + (w - size) // 2 if color else x
            for letter in text.upper():
                for k, dots in enumerate(FONT.get(letter, "00000")):
                    for bit in range(3):
                        if int(dots) >> (2 - bit) & 1:
                            fill(left + 2 * bit, y + h // 2 + 2 * k - 5, 2, 2, 1)
                left += 8
    colors = b"".join(bytes.fromhex(color[1:]) for color in palette)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits a pixel, of a palette
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    chunks = ((b"IHDR", header), (b"PLTE", colors), (b"IDAT", pixels), (b"IEND", b""))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def chrome_trace(schedule: Schedule, simulation: Simulation) -> str:
    """Return JSON for chrome://tracing and Perfetto: a track for each rank, arrows for transfers, live activations.

    A unit of the costs is a second.
    """
    events = [_event("M", "process_name", 0.0, args={"name": f"schedule {schedule.name}"})]
    for rank in range(schedule.num_ranks):
        events.append(_event("M", "thread_name", 0.0, rank, args={"name": f"rank {rank}"}))
    events += _slices(simulation)
    middles = {e.action: (e.start + e.end) / 2 for row in simulation.events for e in row}
    for number, move in enumerate(simulation.transfers):
        flow = {"id": number, "cat": "transfer"}
        events.append(_event("s", "transfer", middles[move.action], move.source, **flow))
        events.append(_event("f", "transfer", move.end, move.destination, bp="e", **flow))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _slices(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for rank, row in enumerate(simulation.events):
        live = 0
        for action, start, end in row:
            args = {"stage": action.stage, "microbatch": action.microbatch}
            yield _event("X", str(action), start, rank, dur=1e6 * (end - start), cat=action.kind, args=args)
            if action.kind in "FWB":
                live += 1 if action.kind == "F" else -1
                at = start if action.kind == "F" else end
                yield _event("C", f"live activations, rank {rank}", at, rank, args={"stage-microbatches": live})


def _event(phase: str, name: str, seconds: float, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "ts": 1e6 * seconds, "pid": 0, "tid": rank, **more}


def _lighter(color: str, share: float) -> str:
    share = min(share, 0.8)
    parts = (int(color[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
