"""OpenTelemetry traces of requests. Imported only where a recipe has `telemetry=otel`."""
