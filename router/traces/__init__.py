"""The process that exports traces, by OpenTelemetry's SDK, and what the router has for it."""
