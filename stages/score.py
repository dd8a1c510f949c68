"""Keep what a run computed of a text, or say how far from such a reference another run is.

A reference is the model's hidden states (after the last norm), not its scores: from them the same
head gives every score again, exactly, and they are smaller by the factor V / D. So the whole
distributions are compared, and a text of 2,000 tokens takes some megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from pipeline.errors import RequestError
from pipeline.identity import digest
from pipeline.types import Batch, Comparison, PromptLogprob, Sequence, Target
from pipeline.types.places import user_path
from stages.prompt_scores import logits_rows

if TYPE_CHECKING:
    from stages.samplers.filters import Floats


@dataclass
class Scored:
    """What a row's scoring has and is given: hidden states of all its tokens but the last."""

    reference_TD: mx.array | None = None
    chunks: list[mx.array] = field(default_factory=list)  # recorded so far


class Score:
    """After chunked_prefill, chunk by chunk: each entry of `prompt_logprobs` gets its `against`.

    A row that does not ask for prompt_logprobs, or whose text has no reference, is refused.
    """

    reads = frozenset(
        {
            "request",
            "prompt_ids",
            "processed_ids",
            "prompt_hidden",
            "prompt_logprobs",
            "score_state",
        }
    )
    writes = frozenset({"prompt_logprobs", "prompt_hidden", "score_state"})
    needs: Mapping[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, target: Target, *, record: str | None = None, reference: str | None = None):
        self.target = target
        self.record = user_path(record) if record else None
        self.reference = user_path(reference) if reference else None

    def run(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            if not sequence.live:
                continue
            try:
                self._take(sequence)
            except Exception as error:  # one row's fault is never another's
                sequence.error = error

    def _take(self, sequence: Sequence) -> None:
        if sequence.request.prompt_logprobs is None:
            raise RequestError(
                "prompt_logprobs: this flow scores prompts and answers nothing; ask for them (0: "
                "the prompt's own tokens, n: the n best as well)",
                param="prompt_logprobs",
            )
        hidden_WD, sequence.prompt_hidden = sequence.prompt_hidden, None
        if hidden_WD is None:
            return
        start = len(sequence.processed_ids) - hidden_WD.shape[0]
        if start == 0:
            sequence.score_state = Scored(self._load(sequence.prompt_ids))
        state: Scored = sequence.score_state
        if state.reference_TD is not None:
            self._compare(sequence, state.reference_TD, hidden_WD, start)
        if self.record is not None:
            state.chunks.append(hidden_WD)
            if sequence.ready:
                self._save(self.record, sequence.prompt_ids, state.chunks)

    def _compare(
        self, sequence: Sequence, reference_TD: mx.array, hidden_WD: mx.array, start: int
    ) -> None:
        entries = list(sequence.prompt_logprobs)
        count = min(hidden_WD.shape[0], len(entries) - start)
        mine = logits_rows(self.target, hidden_WD, count)
        theirs = logits_rows(self.target, reference_TD[start:], count)
        for at, (one_V, other_V) in enumerate(zip(mine, theirs, strict=True), start):
            entries[at] = replace(entries[at], against=compare(entries[at], one_V, other_V))
        sequence.prompt_logprobs = entries

    def _load(self, prompt_ids: list[int]) -> mx.array | None:
        if self.reference is None or len(prompt_ids) < 2:
            return None
        path = self._path(self.reference, prompt_ids)
        if not path.exists():
            raise RequestError(
                f"prompt: no reference of this text by {self.target.name} in {self.reference}. "
                f"Record one with stage.score.record={self.reference} kv=native",
                param="prompt",
            )
        stored: Any = mx.load(str(path))
        return stored["hidden"]

    def _save(self, folder: Path, prompt_ids: list[int], chunks: list[mx.array]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = self._path(folder, prompt_ids)
        unfinished = path.with_suffix(".part.safetensors")
        mx.save_safetensors(str(unfinished), {"hidden": mx.concatenate(chunks)})
        unfinished.replace(path)

    def _path(self, folder: Path, prompt_ids: list[int]) -> Path:
        name = digest({"artifact": self.target.artifact, "tokens": prompt_ids})
        return folder / f"{name}.safetensors"


def compare(entry: PromptLogprob, mine_V: Floats, reference_V: Floats) -> Comparison:
    """KL(reference || mine) over the whole vocabulary, in nats."""
    mine, reference = log_law(mine_V), log_law(reference_V)
    likely = np.isfinite(reference)
    law = np.exp(reference[likely])
    kl = float(np.sum(law * (reference[likely] - mine[likely])))
    agrees = bool(mine_V.argmax() == reference_V.argmax())
    return Comparison(max(0.0, kl), float(reference[entry.token_id]), agrees)


def log_law(logits_V: Floats) -> np.ndarray:
    """log-softmax in float64."""
    shifted = logits_V.astype(np.float64) - float(logits_V.max())
    return shifted - np.log(np.exp(shifted).sum())
