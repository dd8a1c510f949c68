"""GET /openapi.json: the API's own description, made of the models that check its requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from pipeline.server.chat import ChatBody
from pipeline.server.completions import TextBody
from pipeline.server.errors import JSON
from pipeline.server.messages_schema import CountBody, MessagesBody
from pipeline.server.pools import Pools
from pipeline.server.responses_schema import ResponsesBody
from pipeline.server.tokens import DetokenizeBody, TokenizeBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": TextBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
READ = ("/v1/models", "/health", "/ready", "/stats", "/openapi.json")  # JSON without parameters
REFS = "#/components/schemas/{model}"
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
ERRORS = ("400", "401", "403", "404", "405", "408", "413", "429", "431", "500", "503")
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"]}},
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    models = [(body, "validation") for body in BODIES.values()]
    names, schemas = models_json_schema(models, ref_template=REFS)  # type: ignore[arg-type]
    paths: dict[str, Any] = {
        path: {"post": _post(path, names[body, "validation"])} for path, body in BODIES.items()
    }
    paths |= {path: {"get": _operation(path)} for path in READ}
    paths["/metrics"] = {"get": _operation("/metrics", kinds=["text/plain"])}
    paths["/v1/models/{name}"] = {"get": _named("/v1/models/{name}")}
    one = "/v1/responses/{name}"
    paths[one] = {"get": _named(one), "delete": _named(one, "delete")}
    paths[one + "/input_items"] = {"get": _named(one + "/input_items")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": ERROR}},
    }


class Description:
    """The endpoint. Making the document takes long enough to be felt by others, so it is made once."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._document: dict[str, Any] | None = None

    async def answer(self, request: Request) -> Response:
        if self._document is None:
            self._document = await self._pools.wait(document)
        return JSON(self._document)


def _post(path: str, schema: Any) -> dict[str, Any]:
    kinds = ["application/json", *(["text/event-stream"] if path in STREAMS else [])]
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {**_operation(path, "post", kinds), "requestBody": body}


def _named(path: str, method: str = "get") -> dict[str, Any]:
    text = {"type": "string", "minLength": 1}
    name = {"name": "name", "in": "path", "required": True, "schema": text}
    return {**_operation(path, method), "parameters": [name]}


def _operation(
    path: str, method: str = "get", kinds: Iterable[str] = ("application/json",)
) -> dict[str, Any]:
    said = {"application/json": {"schema": {"$ref": REFS.format(model="Error")}}}
    responses: dict[str, Any] = {
        status: {"description": "error", "content": said} for status in ERRORS
    }
    if path in ("/health", "/ready"):
        responses["503"] = {"description": "not ready", "content": {"application/json": {}}}
    responses["200"] = {"description": "done", "content": {kind: {} for kind in kinds}}
    word = "".join(letter if letter.isalnum() else "_" for letter in path)
    return {"operationId": method + word, "responses": responses}
