"""Times what the bench promises of saved states without a model. One JSON object on standard output.

python -m stages.tiers.saved.measure index|files [--repeats N]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.types import LayerSpec, Segment, State
from stages.device import Device

ROOTS, PREFIXES, ROOT_TOKENS, OWN_TOKENS, PROMPT_TOKENS = 10, 100_000, 2000, 200, 4000
ARRAYS, ARRAY_BYTES = 60, 400_000  # of a file: about a segment of 512 tokens of a small model
FULL = LayerSpec("full", 0, "full:1x1:float32")


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def prefixes() -> Iterator[tuple[list[int], list[int]]]:
    """Root and own tokens of each saved prefix."""
    roots = [tokens_of(root, ROOT_TOKENS) for root in range(ROOTS)]
    lengths = random.Random(0)
    for index in range(PREFIXES):
        own = tokens_of(1000 + index, lengths.randrange(1, 2 * OWN_TOKENS))
        yield roots[index % ROOTS], own


def bare(tokens: list[int]) -> State:
    """A state without layers: what it costs is the index."""
    return State(tuple(tokens), "n", (), (Segment(0, len(tokens), ()),))


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def index(repeats: int) -> dict[str, Any]:
    """Milliseconds of a look-up and of an insertion, and bytes a stored token, for both tiers."""
    return {"ram": _index(_filled_ram, repeats), "disk": _index(_filled_disk, repeats)}


def _index(fill: Callable[[], Any], repeats: int) -> dict[str, float]:
    before = resident()
    tier = fill()
    held = resident() - before
    times: dict[str, list[float]] = {"lookup": [], "insert": []}
    for at in range(repeats):
        root = tokens_of(at % ROOTS, ROOT_TOKENS)
        prompt = root + tokens_of(900_000 + at, PROMPT_TOKENS - ROOT_TOKENS)
        began = time.perf_counter()
        assert tier.usable(prompt, "n", PROMPT_TOKENS - 1) >= ROOT_TOKENS
        looked = time.perf_counter()
        assert tier.put(bare(prompt))
        times["insert"].append(time.perf_counter() - looked)
        times["lookup"].append(looked - began)
    stored = int(tier.stats()["tokens"])
    milliseconds = {name: statistics.median(taken) * 1e3 for name, taken in times.items()}
    return {**milliseconds, "bytes": held / stored, "tokens": stored}


def _filled_ram() -> Any:
    from stages.tiers.ram import Ram

    tier = Ram(max_gb=100)
    for root, own in prefixes():
        assert tier.put(bare(root + own))
    return tier


def _filled_disk() -> Any:
    """As after a start: everything is written."""
    from stages.tiers.disk import Disk
    from stages.tiers.radix import pack
    from stages.tiers.saved.index import Row

    part: Any = None
    tier = Disk(part, part, path=tempfile.mkdtemp())
    names: dict[int, str] = {}

    def place(parent: str, start: int, ids: list[int]) -> str:
        name = hashlib.sha256(parent.encode() + pack(ids)).hexdigest()[:40]
        row = Row("run", "n", parent, start, start + len(ids), pack(ids), "x", cuttable=True)
        tier.store.shelf.place(name, row, 1)
        return name

    for root, own in prefixes():
        if (parent := names.get(root[0])) is None:
            parent = ""
            for start in range(0, ROOT_TOKENS, 512):
                parent = place(parent, start, root[start : start + 512])
            names[root[0]] = parent
        place(parent, ROOT_TOKENS, own)
    tier.mount(collect=False)
    return tier


def files(repeats: int) -> dict[str, Any]:
    """Seconds to write and to read a file, checksums included, and of the bare system calls; in turn."""
    from stages.tiers.saved import format as form
    from stages.tiers.saved.folder import Folder
    from stages.tiers.saved.payload import HostArray

    data = np.random.default_rng(0).integers(0, 255, (ARRAYS, ARRAY_BYTES // 4, 4), np.uint8)
    arrays = [HostArray("U8", part) for part in data]
    header = form.Header("run", "n", "", 0, 1, b"\0\0\0\0", "x", (FULL,), structure={"v": 0})
    with tempfile.TemporaryDirectory(dir=os.environ.get("HEADRACE_MEASURE")) as place:
        folder, raw = Folder(Path(place) / "states"), Path(place) / "raw"
        folder.make()
        taken: dict[str, list[float]] = {}
        for turn in range(repeats):
            name = f"{turn:040x}"
            path = folder.path(name)
            works: dict[str, Callable[[], Any]] = {
                "write": partial(_write, folder, name, header, arrays),
                "raw_write": partial(_raw_write, raw, data),
                "read": partial(form.read_file, path),
                "raw_read": partial(_raw_read, raw, data.nbytes),
            }
            for which, work in works.items():
                forget(path if which == "read" else raw)
                began = time.perf_counter()
                work()
                taken.setdefault(which, []).append(time.perf_counter() - began)
    return {**taken, "bytes": data.nbytes}


def _write(folder: Any, name: str, header: Any, arrays: list[Any]) -> None:
    from stages.tiers.saved import format as form

    draft = folder.begin(name, form.file_size(header, arrays))
    form.write(draft.file, header, arrays)
    folder.publish(draft)


def _raw_write(path: Path, data: np.ndarray) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(data.data.cast("B"))
        os.fsync(file.fileno())


def _raw_read(path: Path, size: int) -> None:
    buffer = np.empty(size, np.uint8)
    with path.open("rb", buffering=0) as file:
        at = 0
        while at < size:
            at += file.readinto(buffer.data[at:])


def forget(path: Path) -> None:
    """Make the system forget what it keeps of a file in memory."""
    if path.exists() and hasattr(os, "posix_fadvise"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("index", "files"))
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    Device(kind="cpu").open()
    print(json.dumps({"index": index, "files": files}[args.what](args.repeats)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
