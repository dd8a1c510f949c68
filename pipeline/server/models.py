"""What can be named as a request's `model`: the served one, and that with each mounted adapter."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pipeline.errors import RequestError
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import JSON


def adapted(model: str, adapter: str) -> str:
    """The name under which a client that can only choose a model chooses an adapter."""
    return f"{model}:{adapter}"


@dataclass(frozen=True)
class Models:
    """GET /v1/models, /v1/models/{name}."""

    engine: ServedEngine
    started: int = field(default_factory=lambda: int(time.time()))

    async def all(self, request: Request) -> Response:
        return JSON({"object": "list", "data": list(self._known().values())})

    async def one(self, request: Request) -> Response:
        found = self._known().get(request.path_params["name"])
        if found is None:
            message = "No such model; GET /v1/models lists those that are served."
            raise RequestError(message, param="model", code="model_not_found", status=404)
        return JSON(found)

    def _known(self) -> dict[str, dict[str, Any]]:
        """By name, the plain one first."""
        info = self.engine.target_info
        name, adapters = info["name"], list(info["adapters"])
        base = {"object": "model", "created": self.started, "owned_by": "headrace"}
        base |= {"context_window": info["context_len"]}
        found = {name: {"id": name, **base, "adapters": adapters}}
        for adapter in adapters:
            own = adapted(name, adapter)
            found[own] = {"id": own, **base, "parent": name, "adapter": adapter}
        return found
