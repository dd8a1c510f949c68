"""What is kept of an answer under way, so that the same request may go on from it after a crash."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.identity import digest
from pipeline.types import Attachment, Attempt, Emitted, Origin, Sequence, TokenLogprob

SCHEMA = "resume-1"  # of the record; others are not gone on from


def key_of(sequence: Sequence) -> str:
    """Digest of all that decides which answer this is and who asked. A seed that the server chose is
    not in it: it is restored."""
    request, sampling = sequence.request, sequence.sampling
    grammar = request.grammar and {**asdict(request.grammar), "field": ""}
    facts: Mapping[str, Any] = {
        "schema": SCHEMA,
        "namespace": sequence.namespace,
        "prompt": sequence.prompt_ids,
        "sampling": {**asdict(sampling), "logit_bias": sorted(sampling.logit_bias or ())},
        "max_new": sequence.max_new,
        "stop": list(request.stop),
        "logprobs": request.logprobs,
        "grammar": grammar,
        "reasoning_budget": request.reasoning_budget and request.reasoning_budget.tokens,
        "ignore_eos": request.ignore_eos,
        "client": request.client,
    }
    return digest(facts)


class Logprobs:
    """Log-probabilities of all emitted tokens, exactly: of each its own and the `width` best."""

    def __init__(self, tensors: Seq[Any] = ()) -> None:
        words = [np.asarray(tensor) for tensor in tensors]
        self.values = array("d", words[0].view(np.float64) if words else ())
        self.ids = array("i", words[1] if len(words) > 1 else ())

    def add(self, entry: TokenLogprob) -> None:
        self.values.append(entry.logprob)
        for token_id, logprob in entry.top:
            self.ids.append(token_id)
            self.values.append(logprob)

    def __len__(self) -> int:
        return len(self.values) - len(self.ids)

    def tensors(self) -> tuple[Any, ...]:
        """uint32 words of the float64 values, int32 ids; none of either where there is nothing."""
        words = np.frombuffer(self.values, np.uint32), np.frombuffer(self.ids, np.int32)
        return tuple(mx.array(each) for each in words if each.size)

    def entries(self, token_ids: Seq[int]) -> list[TokenLogprob]:
        """ValueError where these are not the log-probabilities of so many tokens."""
        count = len(token_ids)
        width = len(self.ids) // count
        if len(self) != count or width * count != len(self.ids):
            raise ValueError(f"{len(self)} log-probabilities of {count} tokens")
        values_NW = np.frombuffer(self.values, np.float64).reshape(count, 1 + width).tolist()
        ids_NW = np.array(self.ids, np.int32).reshape(count, width).tolist()
        return [
            TokenLogprob(token, values[0], tuple(zip(ids, values[1:], strict=True)))
            for token, values, ids in zip(token_ids, values_NW, ids_NW, strict=True)
        ]


@dataclass
class Progress:
    """Where the captures of one answer stand, in emitted tokens."""

    attempt: Attempt
    logprobs: Logprobs = field(default_factory=Logprobs)
    seen: int = 0  # emitted tokens whose log-probabilities are in `logprobs`
    captured: int = 0  # emitted tokens in the last capture
    lag: int = 0  # emitted while that one was being written
    burst: int = 1  # the most that a round has emitted
    waits: bool = False  # it is still being written

    def hear(self, sequence: Sequence) -> None:
        """Take in what the round has emitted."""
        self.burst = max(self.burst, len(sequence.output_ids) - self.seen)
        if sequence.request.logprobs is not None:
            for emitted in sequence.emitted[: len(sequence.output_ids) - self.seen]:
                if emitted.logprob is not None:
                    self.logprobs.add(emitted.logprob)
        self.seen = len(sequence.output_ids)

    def complete(self, sequence: Sequence) -> bool:
        """Whether nothing emitted was missed: a round that failed half-way is not heard of."""
        return sequence.request.logprobs is None or len(self.logprobs) == len(sequence.output_ids)

    def due(self, every: int) -> int:
        """Emitted tokens at which to capture next: the first at once, for the prompt and the seed; later
        ones so early that they are on disk before `every` tokens more have been emitted. What comes in
        bursts is captured before the burst that might go beyond."""
        early = min(every // 2, max(self.lag, every // 8))
        return self.captured + max(1, every - early - self.burst + 1) if self.captured else 1

    def record(self, sequence: Sequence) -> Attachment:
        """What a state does not say of an answer that has got so far."""
        said = {"prompt": len(sequence.prompt_ids), "pending": sequence.pending}
        metadata = {**said, "seed": sequence.seed}
        return Attachment(self.attempt.label, SCHEMA, metadata, self.logprobs.tensors())


def emitted_by(record: Attachment, tokens: Seq[int], sequence: Sequence) -> list[Emitted]:
    """The emitted tokens of a record, whose state holds `tokens`. ValueError, KeyError where the record
    is not of this request."""
    start = int(record.metadata["prompt"])
    if record.schema != SCHEMA or start != len(sequence.prompt_ids) or len(tokens) < start:
        raise ValueError(f"a record of {start} prompt tokens, {len(tokens)} in all")
    ids = [*tokens[start:], int(record.metadata["pending"])]
    origin = Origin("resumed") if sequence.request.origins else None
    if sequence.request.logprobs is None:
        return [Emitted(token, None, origin) for token in ids]
    entries = Logprobs(record.tensors).entries(ids)
    return [Emitted(token, entry, origin) for token, entry in zip(ids, entries, strict=True)]
