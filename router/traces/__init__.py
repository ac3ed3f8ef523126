"""The process that exports traces, by OpenTelemetry's SDK, and the router's part of the export."""
