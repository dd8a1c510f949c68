"""What every drafter with a checkpoint of its own does around its family's model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pipeline.errors import OpenError
from pipeline.types import DraftRows, Target
from stages.drafters.neural.checkpoint import Tensors, files, nbytes


class Model(Protocol):
    """A family's weights, loaded for one target."""

    tensors: Tensors

    @property
    def taps(self) -> Seq[int]: ...
    @property
    def bytes_per_token(self) -> float:
        """What its own cache keeps of one token."""


M = TypeVar("M", bound=Model)


class NeuralDrafter(Generic[M]):
    """A subclass says its `family`, loads the model and makes rows of it.

    `settings` are those of its knobs that change what its rows hold, so they go into the namespace.
    It follows the target's own states, so tokens that another drafter proposed are as good as its
    own ("external"), but it cannot be refilled from ids; it says how sure it is ("grade").
    """

    can: frozenset[str] = frozenset({"external", "grade"})
    needs: Mapping[str, frozenset[str]] = {"model": frozenset({"taps"})}
    prefill = "tail"
    family = ""

    def __init__(self, target: Target, path: str | None, *settings: object):
        self._target, self.path, self._settings = target, path, settings
        self.namespace = self._named(path)
        self.taps: Seq[int] = ()
        self.weight_bytes, self.bytes_per_token = 0, 0.0
        self.model: M | None = None

    @property
    def folder(self) -> Path | str:
        """Where its files are: `path`, or the target's own folder. OpenError if it has none."""
        place = self.path if self.path is not None else self._target.home
        if not isinstance(place, str | Path):
            raise OpenError(f"{self._target.name} has no checkpoint folder; set drafter.path.")
        return place

    def load(self) -> tuple[M, str]:
        """The model and the identity of the files it came from. OpenError where they do not fit."""
        raise NotImplementedError

    def rows_of(self, model: M, max_width: int) -> DraftRows:
        raise NotImplementedError

    def files(self) -> dict[str, Path]:
        return files(self.path)

    def open(self) -> None:
        self.model, artifact = self.load()
        self.namespace, self.taps = self._named(artifact), self.model.taps
        self.weight_bytes = nbytes(self.model.tensors)
        self.bytes_per_token = self.model.bytes_per_token

    def close(self) -> None:
        self.model = None

    def rows(self, target: Target, max_width: int) -> DraftRows:
        assert self.model is not None, "the drafter is not open"
        return self.rows_of(self.model, max_width)

    def _named(self, artifact: object) -> str:
        return ":".join(map(str, (self.family, artifact, *self._settings)))
