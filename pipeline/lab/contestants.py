"""The servers that are compared: separate processes, resident together, of which one works at a time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.lab.children import Child
from pipeline.lab.sse import BenchError, Refused, Reply, get, post

START_S = 180.0
TAIL = 2000  # bytes of a log that are told
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def threads_here() -> int:
    """BLAS threads where nobody says how many: all cores but one, the client's."""
    return max(1, (os.cpu_count() or 1) - 1)


def environment(threads: int) -> dict[str, str]:
    # bytecode is kept, as on a user's machine: without it each start compiles our files again
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {name: str(threads) for name in THREADS}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Contestant:
    """A server started by Python's arguments with `{port}` in them. Its output goes to a file until it
    fails; it ends with this process."""

    def __init__(self, name: str, command: Sequence[str], threads: int):
        self.name, self.port = name, free_port()
        self._command = [part.replace("{port}", str(self.port)) for part in command]
        self._threads = threads
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self._process: Child | None = None

    def start(self) -> None:
        self._process = Child(
            self._command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(self._threads),
        )

    def wait(self) -> None:
        """Until it has answered a request, so that the weights are loaded. BenchError with its log."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if (code := self._process.poll()) is not None:
                error = BenchError(self._last_words())
                error.code = code
                raise error
            try:
                self.get("/health")
                self.complete("Hello", max_tokens=1)
                return
            except BenchError:
                time.sleep(0.2)
        raise BenchError(f"{self.name} did not start in {START_S:.0f} s:\n{self._tail()}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.end()
        self._log.close()

    def get(self, path: str) -> bytes:
        with self._logged():
            return get(self.port, path)

    def post(self, path: str, body: Mapping[str, Any], leave_after: int | None = None) -> Reply:
        with self._logged():
            return post(self.port, path, body, leave_after=leave_after)

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """A BenchError with the end of its log, which may say why there was no whole answer."""
        try:
            yield
        except Refused:
            raise
        except BenchError as error:
            raise BenchError(f"{self.name}: {error}\n{self._tail()}") from error

    def _last_words(self) -> str:
        """Why it ended: the last `error: ` that it told, else the end of its log."""
        _, *errors = re.split(r"^error: ", tail := self._tail(), flags=re.MULTILINE)
        return (
            f"{self.name}: {errors[-1].strip()}"
            if errors
            else f"{self.name} ended at once:\n{tail}"
        )

    def _tail(self) -> str:
        """Read where it is: the process writes at the position of the file that both have."""
        log = self._log.fileno()
        start = max(0, os.fstat(log).st_size - TAIL)
        return os.pread(log, TAIL, start).decode(errors="replace")

    def rss_bytes(self) -> int:
        """Resident memory of the process (Linux)."""
        assert self._process is not None
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def forget_peak(self) -> None:
        """From now on `peak_bytes` is of what follows, without the loading (Linux)."""
        for place in self._processes():
            with contextlib.suppress(OSError):
                (place / "clear_refs").write_text("5")

    def peak_bytes(self) -> int | None:
        """Most resident memory so far, the engine's own process included (Linux; None elsewhere)."""
        peaks = [_peak(place) for place in self._processes()]
        return sum(peaks) if any(peaks) else None

    def _processes(self) -> list[Path]:
        """Folders under /proc of the server and of its children."""
        assert self._process is not None
        own = Path(f"/proc/{self._process.pid}")
        children = [_text(place) for place in own.glob("task/*/children")]
        return [own, *(Path("/proc", pid) for line in children for pid in line.split())]

    def complete(self, prompt: str, **fields: Any) -> Reply:
        """A raw text completion, greedy unless said otherwise."""
        body = {"prompt": prompt, "temperature": 0.0, **fields}
        return self.post("/v1/completions", body)

    def chat(self, text: str, **fields: Any) -> Reply:
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "temperature": 0.0, **fields}
        return self.post("/v1/chat/completions", body)

    def blas(self) -> str:
        """What it says of its products; empty for those that do not say."""
        device = json.loads(self.get("/health")).get("device")
        return f"{device['blas']} {device['kernels']}".strip() if device else ""

    def setting(self, name: str) -> str:
        """What its command says of a setting; KeyError if nothing."""
        said = dict(part.partition("=")[::2] for part in self._command if "=" in part)
        return said[name]

    def count(self, text: str) -> int:
        """Tokens of a raw text. Ours only: a request for no tokens does no work."""
        return self.complete(text, max_tokens=0).prompt_tokens


def _text(place: Path) -> str:
    """Empty for what has ended meanwhile."""
    try:
        return place.read_text()
    except OSError:
        return ""


def _peak(process: Path) -> int:
    lines = _text(process / "status").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class Field:
    """Contestants by name, started when first asked for and stopped together. A context manager."""

    def __init__(self, commands: Mapping[str, Sequence[str]], threads: Mapping[str, int]):
        self._commands, self._threads = commands, threads
        self._running: dict[str, Contestant] = {}
        self.blas: set[str] = set()  # of ours, as they said

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *exc: object) -> None:
        self.dismiss(*self._running)

    def take(self, *names: str) -> list[Contestant]:
        """These, loaded and waiting. One starts after the other: loading is work too."""
        for name in names:
            if name not in self._running:
                one = Contestant(name, self._commands[name], self._threads[name])
                self._running[name] = one
                one.start()
                one.wait()
                self.blas |= {one.blas()} - {""}
        return [self._running[name] for name in names]

    def dismiss(self, *names: str) -> None:
        for name in names:
            if (one := self._running.pop(name, None)) is not None:
                one.stop()


def headrace(recipe: str, *overrides: str, threads: int) -> list[str]:
    own = ("server.port={port}", f"device.threads={threads}")
    return ["-m", "pipeline", "serve", recipe, *overrides, *own]


def mlx_lm(folder: Path, blas: str, threads: int) -> list[str]:
    options = ("--port", "{port}", "--blas", blas, "--threads", str(threads))
    return ["-m", "stages.baseline", "serve", str(folder), *options]
