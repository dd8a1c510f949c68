"""Only the optional C extension needs code; everything else is in pyproject.toml."""

from __future__ import annotations

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-Wno-psabi"]


class OpenMPWherePossible(build_ext):
    """Some compilers come without OpenMP: then the same source runs on one thread."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception:
            ext.extra_compile_args, ext.extra_link_args = FLAGS, ["-ldl"]
            super().build_extension(ext)


# A plain shared library that stages/blas.py loads with ctypes: it needs no Python headers. Without
# a compiler the install goes on and another BLAS is used (`headrace doctor` says which).
blas = Extension(
    "stages._blas",
    sources=["stages/_blas.c"],
    depends=["stages/_blas_tile.h"],
    extra_compile_args=[*FLAGS, "-fopenmp"],
    extra_link_args=["-fopenmp", "-ldl"],
    optional=True,
)

setup(
    ext_modules=[blas] if sys.platform == "linux" else [],
    cmdclass={"build_ext": OpenMPWherePossible},
)
