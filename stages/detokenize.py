"""Turn emitted tokens into delivered text, and say what of the round stays."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from pipeline.types import (
    Batch,
    Delta,
    Emitted,
    FinishReason,
    Origin,
    PromptLogprob,
    Sequence,
    Target,
    TokenLogprob,
)
from pipeline.types.text import StreamDecoder
from stages.stop_text import StopText

# Python's interpreter is left alone this long after a round that began answers: who waits for their first tokens
# passes them on meanwhile, and would else get the interpreter only a millisecond later, after the rest of the round.
HEAD_START_S = 300e-6


@dataclass
class TextState:
    """Where a row's text stands between rounds."""

    decoder: StreamDecoder
    stop: StopText


@dataclass
class Delivery:
    """What one round delivers to one row."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    prompt: tuple[PromptLogprob | None, ...] = ()
    finish: FinishReason | None = None
    stop: str | None = None  # the stop string that is complete

    def send(self, sequence: Sequence) -> None:
        if self.text or self.token_ids:
            told = tuple(self.token_ids), tuple(self.logprobs), tuple(self.origins)
            sequence.deliver(Delta(self.text, *told, self.prompt))


class Detokenize:
    """Emitted tokens are taken one by one, so that how a sequence is cut into bursts changes nothing.

    * A stop string ends the row at the token that completes it. That token and all before it are
      delivered as ids and log-probabilities and counted in usage, even where their text is cut.
    * EOS ends the row. It is counted once in usage (`output_ids`), but it is no content: it has no
      text, no entry in a Delta's ids or log-probabilities, and no place in a published state.
      Hence usage == ids == log-probabilities, plus one if the row ended by EOS.
    * A token that completes the row's constraint ends it with "stop".
    * The last token of the budget ends the row with "length", unless it is EOS or completes a stop
      string: then "stop". Text held back for a stop string that did not come goes out at the end,
      as do the bytes of an unfinished character, as replacement marks.
    * A token's id goes out with the round that emitted it, even if its text is still held back.
    * `kept` = 1 + delivered drafts: the inputs of the round's window [pending] + proposal that stay.
      A cancelled or failed row keeps 0.
    """

    reads = frozenset(
        {
            "emitted",
            "accepted",
            "output_ids",
            "max_new",
            "request",
            "sampler",
            "text_state",
            "prompt_logprobs",
        }
    )
    writes = frozenset({"output_ids", "kept", "finish_reason", "stop_string", "text_state"})
    needs: Mapping[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, target: Target):
        self._target = target

    def run(self, batch: Batch) -> None:
        begins = any(sequence.live and not sequence.output_ids for sequence in batch.sequences)
        for sequence in batch.sequences:
            sequence.kept = 0
            if not sequence.live:
                continue
            try:
                self._advance(sequence)
            except Exception as error:  # one row's fault is never another's
                sequence.kept, sequence.error = 0, error
        if begins:
            time.sleep(HEAD_START_S)

    def _advance(self, sequence: Sequence) -> None:
        begins = not sequence.output_ids
        delivery = self.read(sequence, sequence.emitted)
        delivery.prompt = sequence.scored_prompt if begins else ()
        sequence.kept = 1 + min(sequence.accepted, len(delivery.token_ids))
        delivery.send(sequence)
        sequence.finish_reason, sequence.stop_string = delivery.finish, delivery.stop

    def read(self, sequence: Sequence, tokens: Seq[Emitted]) -> Delivery:
        """Take tokens until one ends the row; nothing is delivered yet."""
        state = self._state(sequence)
        eos_ids = frozenset[int]() if sequence.request.ignore_eos else self._target.eos_ids
        delivery = Delivery()
        for emitted in tokens:
            sequence.output_ids += (emitted.token_id,)
            if emitted.token_id in eos_ids:
                delivery.finish = "stop"
            else:
                _take(delivery, state, emitted)
            if emitted is tokens[-1] and _satisfied(sequence):
                delivery.finish = "stop"
            if delivery.finish is None and len(sequence.output_ids) >= sequence.max_new:
                delivery.finish = "length"
            if delivery.finish:
                _flush(delivery, state)
                break
        return delivery

    def _state(self, sequence: Sequence) -> TextState:
        if sequence.text_state is None:
            request, tokenizer = sequence.request, self._target.tokenizer
            shown = tokenizer.dialect.shown if request.marks else frozenset[int]()
            sequence.text_state = TextState(tokenizer.decoder(shown), StopText(request.stop))
        state: TextState = sequence.text_state
        return state


def _satisfied(sequence: Sequence) -> bool:
    """Whether the tokens emitted so far are all that the row's constraint allows."""
    return sequence.sampler is not None and sequence.sampler.matcher.done


def _take(delivery: Delivery, state: TextState, emitted: Emitted) -> None:
    text, delivery.stop = state.stop.push(state.decoder.push(emitted.token_id))
    delivery.text += text
    delivery.token_ids.append(emitted.token_id)
    if emitted.logprob is not None:
        delivery.logprobs.append(emitted.logprob)
    if emitted.origin is not None:
        delivery.origins.append(emitted.origin)
    if delivery.stop:
        delivery.finish = "stop"
        state.decoder.flush()  # what follows the stop string in this token is not content


def _flush(delivery: Delivery, state: TextState) -> None:
    """The end of the text. The decoder's rest may still complete a stop string."""
    text, stop = state.stop.push(state.decoder.flush())
    delivery.text += text if stop else text + state.stop.flush()
    if stop:
        delivery.finish, delivery.stop = "stop", stop
