"""The target over an mlx-lm model, shared by every option that loads one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from pipeline.errors import OpenError, at_least
from pipeline.identity import digest
from pipeline.types import Device, LayerSpec, Sampling, Tokenizer
from stages.models.loading.fingerprint import user_folder
from stages.models.loading.fronts import make_ragged
from stages.models.loading.layers import layer_specs
from stages.models.loading.mixers import make_replayable
from stages.models.loading.paths import checkpoint_files
from stages.models.loading.precision import lay_out
from stages.models.loading.ragged import prove_ragged
from stages.models.loading.rounding import BITS, squeeze
from stages.models.loading.routing import route, watch
from stages.models.loading.row_adapters import RowAdapters
from stages.models.loading.split import SplitModel
from stages.models.loading.taps import TappedModel
from stages.models.text.chat_template import template_file


@dataclass
class Loaded:
    """What a loader hands over: an mlx-lm model with its weights, and what is known about it."""

    model: Any  # mlx.nn.Module
    tokenizer: Tokenizer
    artifact: str
    context_len: int
    eos_ids: frozenset[int]
    generation: Sampling = field(default_factory=Sampling)
    config: Mapping[str, Any] = field(default_factory=dict)
    home: Path | None = None
    notes: list[str] = field(default_factory=list)


class MLXTarget:
    """A `Target` whose `load` gives an mlx-lm model. Attributes are those of the protocol;
    `notes` are sentences about what was done to the weights and which template is in use."""

    can = frozenset({"score", "taps", "adapt"})
    name = ""
    tokenizer: Tokenizer
    artifact: str
    vocab_size: int
    context_len: int
    eos_ids: frozenset[int]
    generation: Sampling
    specs: tuple[LayerSpec, ...]
    dtype: str
    weight_bytes: int
    layer_count: int
    hidden_size: int
    model_config: Mapping[str, Any]
    home: Path | None
    template: str | None  # the setting: Jinja source or a file

    def __init__(
        self, device: Device, *, context: int | None, cache_dir: str | None, bits: int | None = None
    ):
        if bits is not None and bits not in BITS:
            raise ValueError(f"bits: wants one of {', '.join(map(str, BITS))} or null, got {bits}")
        self.device, self.context, self.bits = device, at_least("context", context, 1), bits
        self.memory = user_folder(cache_dir)
        self.calls = 0
        self.row_adapters = RowAdapters()
        self.notes: list[str] = []
        self._split: SplitModel | None = None
        self._taps: TappedModel | None = None

    def locate(self) -> Path:
        """The file or folder to read; OpenError if it is not there."""
        raise NotImplementedError

    def files(self) -> dict[str, Path]:
        place, template = self.locate(), template_file(self.template)
        found = [place] if place.is_file() else checkpoint_files(place)
        return {path.name: path for path in [*found, *([template] if template else [])]}

    def load(self) -> Loaded:
        """Read the checkpoint; OpenError saying what to install or change."""
        raise NotImplementedError

    def open(self) -> None:
        loaded = self.load()
        self.tokenizer, self.artifact = loaded.tokenizer, loaded.artifact
        if self.bits is not None:
            self.artifact = digest({"artifact": loaded.artifact, "bits": self.bits})
            loaded.notes += squeeze(loaded.model, self.bits, self.device)
        self.eos_ids, self.generation = loaded.eos_ids, loaded.generation
        self.model_config, self.home = loaded.config, loaded.home
        self.notes = [*loaded.notes, *lay_out(loaded.model, self.device)]
        from stages.models.loading.cpu_math import quicken  # compiles when it is imported

        self.notes += quicken(loaded.model, self.device)
        self.context_len = self._context(loaded.context_len)
        self._probe(loaded.model)
        self.calls = 0

    def close(self) -> None:
        self._split = self._taps = None
        mx.clear_cache()

    def hidden(self, tokens_BW: Any, caches: Sequence[Any]) -> Any:
        assert self._split is not None, f"{self.name} is not open"
        return self._split.hidden(tokens_BW, caches)

    def head(self, hidden_BWD: Any) -> Any:
        assert self._split is not None, f"{self.name} is not open"
        return self._split.head(hidden_BWD)

    def tapped(self, tokens_BW: Any, caches: Sequence[Any], taps: Sequence[int]) -> tuple[Any, Any]:
        assert self._taps is not None, f"{self.name} is not open"
        return self._taps.hidden(tokens_BW, caches, taps)

    def embed(self, tokens_BW: Any) -> Any:
        assert self._taps is not None, f"{self.name} is not open"
        return self._taps.embed(tokens_BW)

    def modules(self) -> Mapping[str, Any]:
        assert self._split is not None, f"{self.name} is not open"
        return dict(self._split.model.named_modules())

    def prefill_chunk(self, prompt_len: int) -> int | None:
        return None

    def _context(self, own: int) -> int:
        if self.context is None:
            return own
        if not 0 < self.context <= own:
            raise OpenError(
                f"context={self.context} is not within 1..{own}, what {self.name} was made for."
            )
        return self.context

    def _probe(self, model: Any) -> None:
        """One token through the model: proves the cut before the head and shows the layers' state."""
        from mlx.utils import tree_flatten
        from mlx_lm.models.cache import make_prompt_cache

        mx.eval(model.parameters())
        route(model)
        split, caches = SplitModel(model), make_prompt_cache(model)
        asked = watch(caches)
        self.vocab_size = split.verify(caches, make_prompt_cache(model))
        latent = getattr(getattr(split.owner, "args", None), "kv_lora_rank", None)
        self.specs = layer_specs(caches, latent)
        make_ragged(split)
        if any(spec.kind == "recurrent" for spec in self.specs):
            make_replayable(split, lambda: make_prompt_cache(model), self.row_adapters)
        attention = {i for i, spec in enumerate(self.specs) if spec.codable}
        self.can = frozenset({"attend"} if attention <= asked else ())
        prove_ragged(split, self.specs)
        parameters = [array for _, array in tree_flatten(model.parameters())]
        self.weight_bytes = sum(array.nbytes for array in parameters)
        self.dtype = self.specs[0].signature.rsplit(":", 1)[-1] if self.specs else "float32"
        self._split, self._taps = split, TappedModel(split)
        self.layer_count = len(self._taps.layers)
        self.hidden_size = split.hidden(mx.zeros((1, 1), mx.int32), None).shape[-1]


def sampling(config: Mapping[str, Any]) -> Sampling:
    """A `generation_config.json` as `Sampling`. Values that say nothing stay None; `do_sample:
    false` means greedy, whatever temperature stands beside it."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    said = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("do_sample") is False:
        said["temperature"] = 0.0
    return Sampling(**said)
