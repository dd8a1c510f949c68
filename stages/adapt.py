"""Settle which adapters a row wears."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import RequestError
from pipeline.identity import digest
from pipeline.types import Adapters, Batch, Owner, Sequence


class Adapt:
    """When a row starts it gets what is mounted then, a namespace of that content and an owner; all stay the same
    until it ends, so that an adapter that is exchanged while a request waits serves it no stale state.

    A row that comes back (parked, or rebuilt after a fault) goes on with what it wore. If that has been
    unmounted, the row fails by name.
    """

    reads = frozenset({"request", "namespace"})
    writes = frozenset({"adapters", "namespace", "owner"})
    needs: Mapping[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, adapters: Adapters):
        self.adapters = adapters

    def run(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            try:
                self._settle(sequence)
            except RequestError as error:
                sequence.error = error

    def _settle(self, sequence: Sequence) -> None:
        if sequence.adapters is None:
            worn = self.adapters.resolve(sequence.request)
            if worn:
                facts = {"base": sequence.namespace, "adapters": list(worn)}
                sequence.namespace = digest(facts)
            sequence.adapters = worn
            # Wrong drafts can be asked for (`token_origins`): none is of what another client was answered.
            memory = f"{sequence.namespace}/{sequence.request.client}"
            sequence.owner = Owner(memory, bool(worn))
        elif not self.adapters.holds(sequence.adapters):
            what = "adapter: what this answer had begun with has been unmounted; ask again"
            raise RequestError(what, param="adapter", code="adapter_not_found")
