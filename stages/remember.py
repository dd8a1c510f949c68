"""Tell the drafter how an answer went, so that later ones may be drafted from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pipeline.types import Batch, Drafter, Sequence


class Remember:
    """In `finish`: each answer that has ended well, in its client's memory. Drafters that keep nothing
    are told nothing; one that fails costs later speculation, never this answer."""

    reads = frozenset({"owner", "output_ids", "finish_reason"})
    writes = frozenset[str]()
    needs: Mapping[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, drafter: Drafter):
        self._drafter = drafter

    def run(self, batch: Batch) -> None:
        if learn := getattr(self._drafter, "learn", None):
            for sequence in filter(_ended_well, batch.sequences):
                try:
                    learn(sequence.owner.memory, sequence.output_ids)
                except Exception:
                    logging.getLogger(__name__).warning("an answer was not kept", exc_info=True)


def _ended_well(sequence: Sequence) -> bool:
    ended = sequence.finish_reason is not None
    return ended and sequence.error is None and not sequence.cancelled
