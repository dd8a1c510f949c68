"""The BLAS under MLX's CPU products: which one, and loading it in time.

MLX's Linux CPU wheel is linked to the reference BLAS, ten times slower than OpenBLAS. The dynamic
linker takes `cblas_sgemm` from the first global library that has it, so one that is made global
before `mlx.core` is loaded takes over; afterwards nothing changes and nothing complains.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INSTALL = (
    "install g++ and then headrace again, or `pip install cmeel-openblas` and the system's "
    "libgfortran5, or the system's OpenBLAS (Debian: libopenblas0-pthread)"
)


@dataclass(frozen=True)
class Blas:
    """A BLAS in use. `name` is extension+<backing>, cmeel, system, preloaded or reference."""

    name: str
    path: str
    kernels: str = ""  # the extension's instruction set
    library: ctypes.CDLL | None = None

    @property
    def fast(self) -> bool:
        return self.name != "reference"

    def set_threads(self, threads: int) -> None:
        """Threads of one product, for all products of this process."""
        for name in ("headrace_blas_threads", "openblas_set_num_threads"):
            if (call := getattr(self.library, name, None)) is not None:
                call(ctypes.c_int(threads))


REFERENCE = Blas("reference", "the BLAS inside the mlx wheel")


@contextmanager
def openblas_threads(threads: int) -> Iterator[None]:
    """OpenBLAS makes its thread pool while it is loaded and looks only here for the size."""
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = before


def package_file(package: str, *patterns: str) -> str | None:
    """A file inside an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = (path for folder in folders for p in patterns for path in sorted(Path(folder).glob(p)))
    return next((str(path) for path in found), None)


def scipy_openblas() -> str | None:
    return package_file("scipy_openblas32", "lib/libscipy_openblas*.so*")


def cmeel_openblas() -> str | None:
    return package_file("cmeel", "../cmeel.prefix/lib/libopenblas.so*")


def system_openblas() -> str | None:
    """Where the linker's name for it (`libopenblas.so.0`) leads to is known once it is loaded."""
    if not (name := ctypes.util.find_library("openblas")) or os.sep in name:
        return name
    try:
        return _place(ctypes.CDLL(name))
    except OSError:
        return None


class _LinkMap(ctypes.Structure):
    """What dlinfo(3) says of a library, as far as we want it."""

    _fields_ = (("address", ctypes.c_void_p), ("file", ctypes.c_char_p))


def _place(library: ctypes.CDLL) -> str:
    """The file that it was loaded from."""
    found = ctypes.POINTER(_LinkMap)()
    link_map = 2  # RTLD_DI_LINKMAP
    ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), link_map, ctypes.byref(found))
    return os.fsdecode(found.contents.file)


def extension() -> str | None:
    """Our C library, if a compiler was there to build it. Found, never imported: it is no module."""
    return package_file("stages", "_blas*.so")


def files(choice: str) -> list[Path]:
    """What `load(choice)` takes: our extension, and the first OpenBLAS that can be loaded."""
    own = extension() if choice in ("auto", "extension") else None
    plain = LOADERS if choice == "auto" else (choice,)
    finders = [find for name, find in _openblases().items() if own or name in plain]
    other = next((path for find in finders if (path := find()) and _loads(path)), None)
    return [Path(path) for path in (own, other) if path]


def _openblases() -> dict[str, Callable[[], str | None]]:
    """Best first."""
    return {
        "scipy-openblas32": scipy_openblas,
        "cmeel": cmeel_openblas,
        "system": system_openblas,
    }


def _loads(path: str) -> bool:
    try:
        return ctypes.CDLL(path) is not None
    except OSError:
        return False


def load_extension() -> Blas | None:
    """Our kernels for float32 products, over the first OpenBLAS that loads for the others."""
    if (path := extension()) is None:
        return None
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    library.headrace_blas_kernels.restype = ctypes.c_char_p
    kernels = library.headrace_blas_kernels().decode()
    for name, find in _openblases().items():
        if (backing := find()) and library.headrace_blas_open(os.fsencode(backing)) == 0:
            return Blas(f"extension+{name}", path, kernels, library)
    return Blas("extension", path, kernels, library)


def load_plain(name: str, path: str | None) -> Blas | None:
    """An OpenBLAS with plain names; None where it is absent or lacks a library of its own."""
    try:
        return Blas(name, path, "", ctypes.CDLL(path, ctypes.RTLD_GLOBAL)) if path else None
    except OSError:  # cmeel-openblas needs the system's libgfortran5
        return None


def load_cmeel() -> Blas | None:
    return load_plain("cmeel", cmeel_openblas())


def load_system() -> Blas | None:
    return load_plain("system", system_openblas())


# Best first.
LOADERS: dict[str, Callable[[], Blas | None]] = {
    "extension": load_extension,
    "cmeel": load_cmeel,
    "system": load_system,
}


def load(choice: str, threads: int) -> Blas:
    """Make the chosen BLAS (or the best there is, for "auto") global. Only before mlx is loaded.

    The reference BLAS where none can be loaded: slow, never wrong.
    """
    names = list(LOADERS) if choice == "auto" else [choice]
    with openblas_threads(threads):
        loaded = (LOADERS[name]() for name in names if name in LOADERS)
        blas = next((one for one in loaded if one is not None), REFERENCE)
    blas.set_threads(threads)
    return blas


class _SymbolPlace(ctypes.Structure):
    """What dladdr(3) says of an address; the file name is all we want."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def loaded() -> Blas | None:
    """The BLAS that is global in this process already, by an earlier open or somebody else's hand."""
    everything = ctypes.CDLL(None)
    try:
        address = ctypes.cast(everything.cblas_sgemm, ctypes.c_void_p)
    except AttributeError:
        return None
    place = _SymbolPlace()
    everything.dladdr(address, ctypes.byref(place))
    path = os.fsdecode(place.file or b"?")
    if path == extension():
        return load_extension()
    name = next((name for name, find in _openblases().items() if find() == path), "preloaded")
    return Blas(name, path, "", ctypes.CDLL(path))
