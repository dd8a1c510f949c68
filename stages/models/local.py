"""A Hugging Face layout folder, or a hub id, loaded with mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import Device
from stages.models.loading.fingerprint import artifact
from stages.models.loading.hf_tokens import hf_tokens, read_json
from stages.models.loading.lm import Loaded, MLXTarget, sampling
from stages.models.loading.paths import expand, is_hub_id

LENGTHS = (
    "max_position_embeddings", "max_sequence_length", "model_max_length", "n_positions", "n_ctx",
    "seq_length", "max_seq_len",
)  # fmt: skip


class Local(MLXTarget):
    """An existing folder always wins; `owner/name` goes to the hub through huggingface_hub; what
    looks like a place on disk never does."""

    def __init__(
        self,
        device: Device,
        *,
        path: str,
        revision: str | None = None,
        template: str | None = None,
        context: int | None = None,
        name: str | None = None,
        cache_dir: str | None = None,
        bits: int | None = None,
    ):
        super().__init__(device, context=context, cache_dir=cache_dir, bits=bits)
        self.path, self.revision, self.template = path, revision, template
        self.name = name or path.rstrip("/").rsplit("/", 1)[-1]

    def locate(self) -> Path:
        """The folder, links resolved."""
        if (place := expand(self.path)).is_dir():
            return place
        if is_hub_id(self.path):
            return self._download()
        raise OpenError(f"No such folder: {place} (from '{self.path}').")

    def _download(self) -> Path:
        from mlx_lm.utils import _download

        try:
            return Path(_download(self.path, revision=self.revision)).resolve()
        except Exception as error:  # many kinds: offline, no such repository, no access
            raise OpenError(
                f"'{self.path}' is no folder here, and the hub gave: {error}"
            ) from error

    def load(self) -> Loaded:
        from stages.models.loading.precision import settle

        folder = self.locate()
        model, config = _model(folder)
        notes = settle(model, self.device)
        tokenizer, eos, origin = hf_tokens(folder, self.template)
        generation = read_json(folder / "generation_config.json")
        return Loaded(
            model=model,
            tokenizer=tokenizer,
            artifact=self._artifact(folder),
            context_len=_context_len(folder, config, self.context),
            eos_ids=eos | _ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
            generation=sampling(generation),
            config=config,
            home=folder,
            notes=[*notes, f"Chat template: {origin}."],
        )

    def _artifact(self, folder: Path) -> str:
        files = {p.name: p for p in [folder / "config.json", *folder.glob("*.safetensors")]}
        facts = {"weights": self.device.weights, "kind": self.device.kind}
        return artifact(files, facts, self.memory)


def _model(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Lazy arrays: what is dequantized or cast anyway is read only once."""
    if not (folder / "config.json").exists():
        raise OpenError(
            f"{folder} holds no config.json; it is no Hugging Face layout model folder."
        )
    from mlx_lm.utils import load_model

    try:
        return load_model(folder, lazy=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise OpenError(f"mlx-lm cannot load {folder}: {error}") from error


def _context_len(folder: Path, config: Mapping[str, Any], setting: int | None) -> int:
    for source in (config, config.get("text_config") or {}):
        for key in LENGTHS:
            if isinstance(value := source.get(key), int):
                return value
    if setting is None:
        raise OpenError(f"{folder / 'config.json'} states no context length; set model.context.")
    return setting


def _ids(value: Any) -> frozenset[int]:
    """`eos_token_id` is a number, a list or absent."""
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
