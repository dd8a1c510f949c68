"""The device in processes of its own: what a BLAS must do before mlx is imported cannot be undone."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages import blas
from stages.device import Device, cores

ROOT = Path(__file__).resolve().parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS has its own BLAS")
needs_extension = pytest.mark.skipif(
    blas.extension() is None, reason="the C extension is not built"
)

# Calls our library directly, without mlx. A column of C beyond n must never be written.
GEMM = """
import ctypes, numpy as np
from stages import blas
lib = blas.load("extension", {threads}).library
assert lib is not None
rng = np.random.default_rng(0)
pointer = lambda x: x.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

def gemm(ta, tb, m, n, k, alpha, a, b, beta, c, order=101):
    lib.cblas_sgemm(order, ta, tb, m, n, k, ctypes.c_float(alpha), pointer(a), a.shape[1],
                    pointer(b), b.shape[1], ctypes.c_float(beta), pointer(c), c.shape[1])

def matrix(rows, cols, pad):
    flat = rng.standard_normal(rows * (cols + pad) + 1, dtype=np.float32)
    return flat[1:].reshape(rows, cols + pad)  # 4 bytes off any alignment

def check(ta, tb, m, n, k, alpha=1.0, beta=0.0):
    a = matrix(m, k, 3) if ta == 111 else matrix(k, m, 2)
    b = matrix(n, k, 1) if tb == 112 else matrix(k, n, 5)
    c = matrix(m, n, 2)
    before = c.copy()
    if beta == 0:
        c[:, :n] = np.nan
    gemm(ta, tb, m, n, k, alpha, a, b, beta, c)
    A = (a[:, :k] if ta == 111 else a[:, :m].T).astype(np.float64)
    B = (b[:, :k].T if tb == 112 else b[:, :n]).astype(np.float64)
    expected = alpha * A @ B + beta * before[:, :n]
    assert np.abs(c[:, :n] - expected).max() < 1e-5 * (4 + k), (ta, tb, m, n, k, alpha, beta)
    assert (c[:, n:] == before[:, n:]).all(), "wrote past n"
"""


def run(code: str, *flags: str, **environment: str) -> str:
    """Standard output of `code` in a fresh interpreter that imports from this tree."""
    command, env = [sys.executable, *flags, "-c", code], {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def gemm_run(code: str, threads: int = 1) -> str:
    return run(GEMM.replace("{threads}", str(threads)) + code)


OPEN = "import warnings; warnings.simplefilter('ignore')\nfrom stages.device import Device\n"
PRODUCT = "import mlx.core as mx\nprint((mx.ones((2, 3)) @ mx.ones((3, 2))).tolist())\n"


@linux
@needs_extension
def test_every_shape_stride_and_scale_agrees_with_numpy():
    gemm_run("""
for m in [*range(1, 14), 17, 24, 31, 40, 41]:
    for n in (1, 3, 4, 70, 130):
        for k in (1, 5, 16, 33, 100):
            check(111, 112, m, n, k)
            check(111, 111, m, n, k)
for m, n, k in ((1, 7, 9), (3, 5, 40), (8, 65, 17), (50, 33, 70)):
    for ta in (111, 112):
        for tb in (111, 112):
            check(ta, tb, m, n, k, 0.5, 2.0)
            check(ta, tb, m, n, k, -1.5, 1.0)
            check(ta, tb, m, n, k, 2.0, 0.0)
check(111, 111, 4, 600, 30)  # wider than a narrow product's B may be
check(112, 112, 3, 4, 0)
""")


# (B's form, k, n): what the models here multiply (projections, attention scores, probabilities times
# values), and odd ones; 2048 takes several blocks of k and of columns.
BITS = """
assert lib.headrace_blas_use(b"{kernels}") == 0
SHAPES = ((112, 576, 576), (112, 576, 193), (112, 1536, 577), (112, 2049, 131), (112, 64, 1025), (112, 33, 401),
          (112, 5, 3), (112, 1, 130), (111, 512, 64), (111, 301, 65), (111, 77, 200), (111, 65, 601), (111, 9, 1))
for tb, k, n in SHAPES:
    a, b = matrix(512, k, 3), matrix(n, k, 1) if tb == 112 else matrix(k, n, 5)
    turned = np.ascontiguousarray(a[:, :k].T)  # A as its transpose, as MLX may pass it
    started = matrix(512, n, 2)
    for alpha, beta in ((1, 0), (0.5, 2.0)):
        whole = started.copy()
        lib.headrace_blas_threads(2)
        gemm(111, tb, 512, n, k, alpha, a, b, beta, whole)
        lib.headrace_blas_threads(1)
        exact = a[:, :k].astype(np.float64) @ (b[:, :k].T if tb == 112 else b[:, :n])
        assert np.abs(whole[:, :n] - alpha * exact - beta * started[:, :n]).max() < 1e-5 * (4 + k)
        for m in (1, 7, 40, 41, 64, 130):
            for first in (0, 512 - m):
                part = started[first : first + m].copy()
                gemm(111, tb, m, n, k, alpha, a[first:], b, beta, part)
                assert np.array_equal(part, whole[first : first + m]), (tb, k, n, alpha, m, first)
        part = started.copy()
        gemm(112, tb, 512, n, k, alpha, turned, b, beta, part)
        assert np.array_equal(part, whole), (tb, k, n, "A transposed")
"""


def kernel_sets() -> list[str]:
    """Those this machine can run."""
    if (path := blas.extension()) is None:
        return []
    use = ctypes.CDLL(path).headrace_blas_use
    return [name for name in ("generic", "avx2", "avx512") if use(name.encode()) == 0]


@linux
@needs_extension
@pytest.mark.parametrize("kernels", kernel_sets())
def test_a_row_is_the_same_to_the_last_bit_alone_and_with_others(kernels):
    gemm_run(BITS.replace("{kernels}", kernels))


@linux
@needs_extension
def test_the_other_two_products_and_column_major_order():
    gemm_run("""
a, b = rng.standard_normal((5, 7)), rng.standard_normal((7, 6))
c = np.zeros((5, 6))
double = lambda x: x.ctypes.data_as(ctypes.POINTER(ctypes.c_double))
lib.cblas_dgemm(101, 111, 111, 5, 6, 7, ctypes.c_double(2), double(a), 7, double(b), 6, ctypes.c_double(0),
                double(c), 6)
assert np.allclose(c, 2 * a @ b)
z, w = (a + 1j * a[::-1]).astype(np.complex64), (b - 1j * b[::-1]).astype(np.complex64)
out, one, zero = np.zeros((5, 6), np.complex64), np.ones(1, np.complex64), np.zeros(1, np.complex64)
any_ = lambda x: x.ctypes.data_as(ctypes.c_void_p)
lib.cblas_cgemm(101, 111, 111, 5, 6, 7, any_(one), any_(z), 7, any_(w), 6, any_(zero), any_(out), 6)
assert np.allclose(out, z @ w, atol=1e-4)
x, y = matrix(7, 5, 0), matrix(6, 7, 0)  # column-major: 5x7 and 7x6
to = np.zeros((6, 5), np.float32)
gemm(111, 111, 5, 6, 7, 1, x, y, 0, to, order=102)
assert np.allclose(to, y @ x, atol=1e-5)
""")


@linux
@needs_extension
def test_without_any_openblas_plain_loops_take_its_place():
    gemm_run("").strip()
    code = GEMM.replace("{threads}", "1").replace(
        "lib =",
        "blas.scipy_openblas = blas.cmeel_openblas = blas.system_openblas = lambda: None\nlib =",
    )
    run(
        code
        + "\nfor ta in (111, 112):\n    for tb in (111, 112):\n        check(ta, tb, 50, 9, 11, 0.5, 2.0)\n"
    )


@linux
@needs_extension
def test_threads_are_set_and_change_no_bit():
    out = gemm_run(
        """
a, b = matrix(3, 576, 0), matrix(1000, 576, 0)
print(lib.headrace_blas_get_threads())
results = []
for threads in (2, 1):
    lib.headrace_blas_threads(threads)
    c = np.zeros((3, 1000), np.float32)
    gemm(111, 112, 3, 1000, 576, 1, a, b, 0, c)
    results.append(c)
assert (results[0] == results[1]).all()
print(lib.headrace_blas_get_threads())
""",
        threads=2,
    )
    assert out.split() == ["2", "1"]


@linux
@needs_extension
def test_our_kernels_are_the_first_choice_and_opening_twice_changes_nothing():
    out = run(
        OPEN + "d = Device(threads=1); d.open(); d.open(); e = Device(threads=1); e.open()\n"
        "print(d.describe()['blas'], e.describe()['blas'], d.describe()['warnings'], e.warnings)\n"
        + PRODUCT
    )
    name = "extension+scipy-openblas32"
    assert out == f"{name} {name} [] []\n[[3.0, 3.0], [3.0, 3.0]]\n"


@linux
def test_mlx_imported_too_early_is_said_and_does_not_stop_anything():
    out = run(
        OPEN + "import mlx.core\nd = Device(); d.open()\n"
        "print(d.describe()['blas']); print(d.describe()['warnings'][0])\n" + PRODUCT
    )
    assert out.splitlines()[0] == "reference"
    assert "imported before the device was opened" in out
    assert "[[3.0, 3.0], [3.0, 3.0]]" in out


@linux
def test_another_default_device_is_said():
    out = run(
        OPEN + "from stages import blas\nblas.load('auto', 1)\nimport mlx.core as mx\n"
        "real, first = mx.default_device, [mx.Device(mx.gpu, 0)]\n"
        "mx.default_device = lambda: first.pop() if first else real()\n"
        "d = Device(kind='cpu'); d.open(); print(d.warnings)"
    )
    assert "it uses Device(cpu, 0) from now on" in out


@linux
def test_the_chosen_threads_and_a_missing_blas():
    out = run(
        OPEN + "from stages import blas\n"
        "blas.LOADERS.update(extension=lambda: None, cmeel=lambda: None, system=lambda: None)\n"
        "d = Device(threads=3); d.open(); print(d.describe()['threads'], d.describe()['blas'], d.warnings)"
    )
    assert out.startswith("3 reference")
    assert "pip install" in out


@linux
def test_fallbacks_are_tried_in_order():
    out = run(
        "from stages import blas\n"
        "tried = []\n"
        "def loader(name, found):\n"
        "    return lambda: tried.append(name) or (blas.Blas(name, '/lib') if found else None)\n"
        "blas.LOADERS.update(extension=loader('extension', False), cmeel=loader('cmeel', True),"
        " system=loader('system', True))\n"
        "print(blas.load('auto', 1).name, tried, blas.load('none', 1).name)"
    )
    assert out.strip() == "cmeel ['extension', 'cmeel'] reference"


@linux
@needs_extension
def test_the_systems_blas_is_known_by_its_file_and_what_is_not_loaded_is_not_told(tmp_path):
    """On Linux its name is all that can be asked for, and the linker finds the file."""
    soname = "libopenblas.so.0"
    place = tmp_path / soname
    place.write_bytes(Path(blas.extension()).read_bytes())
    out = run(
        "import ctypes.util\n"
        f"ctypes.util.find_library = lambda name: {soname!r}\n" + OPEN + "from stages import blas\n"
        "print(*Device().libraries())\n"
        "blas.scipy_openblas = blas.cmeel_openblas = lambda: None\n"
        "print(*Device().libraries())\n"
        "for _ in range(2):\n"
        "    d = Device(blas='system'); d.open(); told = d.describe()\n"
        "    print(told['blas'], told['blas_path'], *d.libraries().values())\n",
        LD_LIBRARY_PATH=str(tmp_path),
    )
    own = Path(blas.extension()).name
    first, second, *opened = out.splitlines()
    assert first == f"{own} {Path(blas.scipy_openblas()).name}"
    assert second == f"{own} {soname}"
    assert opened == [f"system {place} {place}"] * 2


@linux
def test_blas_none_leaves_mlx_as_shipped():
    out = run(
        OPEN
        + "d = Device(blas='none'); d.open(); print(d.describe()['blas'], d.warnings)\n"
        + PRODUCT
    )
    assert out == "reference []\n[[3.0, 3.0], [3.0, 3.0]]\n"


@linux
def test_an_unavailable_device_says_what_to_install():
    out = run(
        OPEN + "from pipeline.errors import OpenError\n"
        "try:\n    Device(kind='cuda').open()\nexcept OpenError as error:\n    print(error)"
    )
    assert "device cuda is not available" in out
    assert "headrace[cuda]" in out


def test_measure_calls_the_reference_blas_slow(monkeypatch: pytest.MonkeyPatch):
    device = Device(kind="cpu")
    times: Iterator[float] = iter([1.0, 0.01, 0.02])  # 2 GFLOP/s
    monkeypatch.setattr("stages.device.best_of", lambda work, n: next(times))
    monkeypatch.setattr("stages.device.sys.platform", "linux")
    measured = device.measure()
    assert measured["slow"]
    assert "cmeel-openblas" in measured["advice"]
    assert (measured["one_row_ms"], measured["eight_rows_ms"]) == (10.0, 20.0)


def test_the_constructor_stores_and_imports_nothing():
    out = run("import sys\nfrom stages.device import Device\nDevice()\nprint('mlx' in sys.modules)")
    assert out == "False\n"
    assert Device(threads=5).threads == 5
    assert Device().threads == max(1, cores() - 1)
    with pytest.raises(ValueError, match="threads: wants >= 1"):
        Device(threads=0)
