"""Where spans go, by OpenTelemetry's own environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from starlette.middleware import Middleware

from pipeline.errors import OpenError
from pipeline.trace import Telemetry

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

GROUP = "opentelemetry_traces_exporter"  # under which packages of exporters are registered
NAME = "OTEL_SERVICE_NAME"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True)
class Tracing:
    """What sends spans. `content`: with prompts and answers."""

    provider: TracerProvider
    content: bool = False

    @classmethod
    def of(cls, telemetry: Telemetry) -> Tracing | None:
        """None where none are wanted; then nothing of OpenTelemetry is imported."""
        return cls(_provider(telemetry.endpoint), telemetry.content) if telemetry.spans else None

    def middleware(self, paths: Iterable[str]) -> Middleware:
        from pipeline.server.spans.traced import Traced

        return Middleware(Traced, provider=self.provider, paths=paths, content=self.content)

    def close(self) -> None:
        """Send what waits."""
        self.provider.shutdown()


def _provider(endpoint: str | None) -> TracerProvider:
    """What makes spans and sends them on a thread of its own. OpenError says what to install."""
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        what = f"telemetry=otel needs a package: {error.name}."
        raise OpenError(f"{what} Try: pip install 'headrace[otel]'") from error
    named = {} if os.environ.get(NAME) else {"service.name": "headrace"}
    provider = TracerProvider(resource=Resource.create(named))
    for exporter in _exporters(endpoint):
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporters(endpoint: str | None) -> list[Any]:
    """Those of OTEL_TRACES_EXPORTER (`otlp` where it is not set, `console`, `none`); an endpoint in the
    recipe wins over the environment's."""
    said = "otlp" if endpoint else os.environ.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    names = [name.strip() for name in said.split(",")]
    more = {"endpoint": endpoint} if endpoint else {}
    return [_class(_full(name))(**more) for name in names if name != "none"]


def _full(name: str) -> str:
    """`otlp` speaks the protocol that is set."""
    if name != "otlp":
        return name
    protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "http/protobuf")
    return f"otlp_proto_{protocol.partition('/')[0]}"


def _class(name: str) -> Any:
    found = entry_points(group=GROUP)
    if not (named := found.select(name=name)):
        known = ", ".join(sorted({one.name for one in found}))
        what = f"telemetry=otel: no exporter '{name}' is installed (there are: {known})."
        raise OpenError(f"{what} Try: pip install opentelemetry-exporter-{name.replace('_', '-')}")
    return next(iter(named)).load()
