"""Where MLX runs, and what must happen before it is imported. Nothing here imports it at the top."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import OpenError
from stages import blas as blases

Kind = Literal["auto", "cpu", "metal", "cuda"]

SLOW_GFLOPS = 10.0  # one core: the reference BLAS 3 to 8, OpenBLAS 20 (small ARM boards) to 120


def cores() -> int:
    """Cores this process may use: its affinity, or a container's quota where that is less."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or the quota is "max"
        return count


def memory_bytes() -> tuple[int, int]:
    """The machine's memory and what of it is free, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total, total
    free = next((line for line in lines if line.startswith("MemAvailable")), "")
    return total, int(free.split()[1]) * 1024 if free else total


def _version(package: str) -> str | None:
    from importlib import metadata  # a fiftieth of the time of `check`

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def probable_kind() -> str:
    """What `auto` will be; decided before mlx is imported, from the installed wheel."""
    if sys.platform == "darwin":
        return "metal" if platform.machine() == "arm64" else "cpu"
    cuda = _version("mlx-cuda-12") or _version("mlx-cuda-13")
    return "cuda" if cuda and os.path.exists("/dev/nvidiactl") else "cpu"


class Device:
    """Chooses the device, and on a Linux CPU the BLAS and its threads.

    `threads` None: one less than the cores, at least one: with all of them, any other process
    that wants a core makes every product wait for it. `weights` says what checkpoints whose scales
    are 16-bit become on a CPU, where their products are slow; models apply it. Opening twice with the
    same settings changes nothing.
    """

    can: frozenset[str] = frozenset()

    def __init__(
        self,
        *,
        kind: Kind = "auto",
        threads: int | None = None,
        weights: Literal["float32", "as_is"] = "float32",
        blas: Literal["auto", "extension", "cmeel", "system", "none"] = "auto",
    ) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads: wants >= 1, or null for all cores but one; got {threads}")
        self.kind: str = kind
        self.threads = threads or max(1, cores() - 1)
        self.weights = weights
        self.blas = blas
        self.warnings: list[str] = []
        self._blas = blases.REFERENCE
        self._unlimited: dict[str, int] = {}  # bounds before the first `limit_memory`

    def open(self) -> None:
        """Load the BLAS, import mlx, make the device the default one. OpenError if it is not here."""
        self.warnings = []
        kind = probable_kind() if self.kind == "auto" else self.kind
        if sys.platform == "linux" and kind == "cpu":
            self._blas = self._fast_products()
        self._use(kind)
        self.kind = kind

    def close(self) -> None:
        """End an engine thread's MLX streams; left to the thread's own end they abort the process
        now and then (mlx 0.32.4, "terminate called"). A loaded library stays for the process's life."""
        owner = threading.current_thread() is not threading.main_thread()
        if owner and "mlx.core" in sys.modules:
            sys.modules["mlx.core"].clear_streams()

    def _fast_products(self) -> blases.Blas:
        """The BLAS for this process: the one that is here already, else the best that can be loaded."""
        if (found := blases.loaded()) is not None:
            if self.blas == "none":
                self._warn(
                    f"{found.path} is loaded already and stays: device.blas=none comes too late"
                )
            found.set_threads(self.threads)
            return found
        if self.blas == "none":
            return blases.REFERENCE
        if "mlx.core" in sys.modules:
            self._warn(
                "mlx was imported before the device was opened, so its slow reference BLAS stays: "
                "open the device (pipeline.load does it) before importing mlx"
            )
            return blases.REFERENCE
        found = blases.load(self.blas, self.threads)
        if not found.fast:
            self._warn(f"no fast BLAS was found (device.blas={self.blas}): {blases.INSTALL}")
        return found

    def _use(self, kind: str) -> None:
        asked_before = "mlx.core" in sys.modules
        import mlx.core as mx

        available = {"cpu": True, "metal": mx.metal.is_available(), "cuda": mx.cuda.is_available()}
        if not available[kind]:
            extra = " Install it with `pip install 'headrace[cuda]'`." if kind == "cuda" else ""
            raise OpenError(
                f"device {kind} is not available to mlx {_version('mlx')} here.{extra} Or try: device=cpu"
            )
        device = mx.Device(mx.cpu if kind == "cpu" else mx.gpu, 0)
        if asked_before and mx.default_device() != device:
            self._warn(f"mlx was using {mx.default_device()}; it uses {device} from now on")
        mx.set_default_device(device)

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def limit_memory(self, nbytes: int | None) -> Mapping[str, int]:
        """Bound what MLX allocates (a Linux CPU build only keeps less in reserve by it; Metal waits,
        then fails), and on Metal what stays wired, as far as the machine allows. None: as before."""
        import mlx.core as mx

        wanted = dict(self._unlimited)
        if nbytes is not None:
            wanted = {"memory_limit_bytes": nbytes}
            if self.kind == "metal":
                most = int(mx.device_info()["max_recommended_working_set_size"])
                wanted["wired_limit_bytes"] = min(nbytes, most)
        setters = {
            "memory_limit_bytes": mx.set_memory_limit,
            "wired_limit_bytes": mx.set_wired_limit,
        }
        before = {name: int(setters[name](value)) for name, value in wanted.items()}
        self._unlimited = {} if nbytes is None else {**before, **self._unlimited}
        return wanted

    def release(self) -> None:
        """MLX's reserve, and what glibc's malloc holds of freed arrays."""
        if (mx := sys.modules.get("mlx.core")) is not None:
            mx.clear_cache()
        with contextlib.suppress(
            OSError, AttributeError
        ):  # no glibc: its allocator gives back by itself
            ctypes.CDLL(None).malloc_trim(0)

    def libraries(self) -> Mapping[str, Path]:
        """Files of the products that are, or would be, loaded before mlx; none where they are MLX's own."""
        kind = probable_kind() if self.kind == "auto" else self.kind
        ours = sys.platform == "linux" and kind == "cpu" and self.blas != "none"
        return {path.name: path for path in blases.files(self.blas)} if ours else {}

    def describe(self) -> Mapping[str, Any]:
        """Plain facts for /health and `doctor`."""
        total, free = memory_bytes()
        x86 = platform.machine() in ("x86_64", "AMD64")
        fusion = self.kind != "cpu" or shutil.which("g++") is not None
        return {
            "kind": self.kind,
            "blas": self._blas.name if self.kind == "cpu" else "",
            "blas_path": self._blas.path if self.kind == "cpu" else "",
            "kernels": self._blas.kernels,
            "threads": self.threads,
            "cores": cores(),
            "mlx": _version("mlx"),
            # MLX fuses elementwise operations on a CPU by calling g++; without it, it runs them one by one.
            "fusion": fusion,
            # It has vector code for ARM only.
            "slow_exp": self.kind == "cpu" and fusion and x86,
            # float32: a position's results have the same bits in a pass of any width. Elsewhere MLX's own
            # reductions (a vector at a time) depend on how many positions there are.
            "exact_width": self.kind == "cpu" and x86 and bool(self._blas.kernels),
            "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "memory_bytes": total,
            "memory_free_bytes": free,
            "warnings": list(self.warnings),
        }

    def measure(self) -> dict[str, Any]:
        """Time float32 products, best of a few: a square one, and a weight matrix times 1 and 8 rows.

        `slow` if they run on the reference BLAS, or as if they did; `advice` then says what to install.
        """
        import mlx.core as mx

        square = mx.random.normal((1024, 1024))
        weights = mx.contiguous(mx.ones((49152, 576)))  # SmolLM2's head: larger than most caches
        mx.eval(square, weights)

        def row_ms(rows: int) -> float:
            x = mx.ones((rows, 576))
            return round(best_of(lambda: mx.eval(x @ weights.T), 6) * 1e3, 2)

        gflops = 2 * 1024**3 / best_of(lambda: mx.eval(square @ square.T), 4) / 1e9
        plain = sys.platform == "linux" and self.kind == "cpu"
        slow = plain and (gflops < SLOW_GFLOPS or not self._blas.fast)
        return {
            "gflops": round(gflops, 1),
            "one_row_ms": row_ms(1),
            "eight_rows_ms": row_ms(8),
            "slow": slow,
            "advice": f"float32 products are slow: {blases.INSTALL}" if slow else "",
        }


def best_of(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several runs: the machine may be shared."""
    seconds = []
    for _ in range(times + 1):  # the first one warms up
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
