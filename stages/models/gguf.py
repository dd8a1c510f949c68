"""A GGUF file: weights, tokenizer and chat template in one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import Device, Sampling
from stages.models.loading.fingerprint import artifact
from stages.models.loading.gguf_archs import ARCHITECTURES, Architecture
from stages.models.loading.gguf_reader import GGUFFile, read
from stages.models.loading.lm import Loaded, MLXTarget
from stages.models.loading.paths import local_path
from stages.models.text.chat_template import template_source


class Gguf(MLXTarget):
    """`device.weights` decides between float32 weights (on a CPU the only ones BLAS serves) and
    the file's own packed ones, where MLX has their form (Q4_0, Q4_1, Q8_0)."""

    def __init__(
        self,
        device: Device,
        *,
        path: str,
        template: str | None = None,
        context: int | None = None,
        name: str | None = None,
        cache_dir: str | None = None,
        bits: int | None = None,
    ):
        super().__init__(device, context=context, cache_dir=cache_dir, bits=bits)
        self.path, self.template = path, template
        self.name = name or Path(path.rstrip("/")).stem

    def locate(self) -> Path:
        """The file to read."""
        return local_path(self.path)

    def load(self) -> Loaded:
        from stages.models.loading.gguf_tokens import gguf_tokens

        file = read(self.locate())
        arch = _architecture(file)
        config = arch.config(lambda key, default=None: _get(file, key, default))
        config["vocab_size"] = len(file.metadata.get("tokenizer.ggml.tokens", ()))
        config["tie_word_embeddings"] = "output.weight" not in file.tensors
        template = template_source(self.template) if self.template else None
        with ThreadPoolExecutor(1) as pool:  # big vocabularies take as long as the weights
            reading = pool.submit(gguf_tokens, file.metadata, template, self.memory)
            model, notes = self._model(file, arch, config)
            tokenizer, words = reading.result()
        return Loaded(
            model=model,
            tokenizer=tokenizer,
            artifact=self._artifact(file),
            context_len=config["max_position_embeddings"],
            eos_ids=words.eos_ids,
            generation=_generation(file),
            notes=[*notes, _template_note(self.template, tokenizer.template)],
        )

    def _model(
        self, file: GGUFFile, arch: Architecture, config: dict[str, Any]
    ) -> tuple[Any, list[str]]:
        from stages.models.loading import gguf_weights as weights
        from stages.models.loading.precision import settle

        stored = " and ".join(sorted(file.types))
        wanted = self.device.kind != "cpu" or self.device.weights == "as_is"
        if wanted and weights.can_stay_packed(file):
            model = weights.build(arch, config, weights.packed_weights(file))
            return model, [f"Weights stay as stored ({stored}).", *settle(model, self.device)]
        why = "MLX has no packed form for all of them" if wanted else "device.weights=float32"
        model = weights.build(arch, config, weights.float_weights(file))
        return model, [f"Weights ({stored}) were dequantized to float32 ({why})."]

    def _artifact(self, file: GGUFFile) -> str:
        facts = {"weights": self.device.weights, "kind": self.device.kind}
        return artifact({"model.gguf": file.path}, facts, self.memory)


def _architecture(file: GGUFFile) -> Architecture:
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise OpenError(
            f"{file.path.name} is of architecture '{name}'; supported are {sorted(ARCHITECTURES)}. "
            "Use model=local with a Hugging Face layout folder for other families."
        )
    return ARCHITECTURES[name]


def _get(file: GGUFFile, key: str, default: Any) -> Any:
    full = f"{file.metadata['general.architecture']}.{key}"
    value = file.metadata.get(full, default)
    if value is None:
        raise OpenError(f"{file.path.name} does not say {full}.")
    return value


def _generation(file: GGUFFile) -> Sampling:
    """`general.sampling.*`, which newer converters write."""
    names = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    names |= {"penalty_repeat": "repetition_penalty"}
    said = {new: file.metadata.get(f"general.sampling.{old}") for old, new in names.items()}
    return Sampling(**{key: value for key, value in said.items() if value is not None})


def _template_note(setting: str | None, template: str | None) -> str:
    if template is None:
        return "No chat template: completions only, unless model.template is set."
    return f"Chat template: {'the recipe' if setting else 'the GGUF file'}'s."
