"""The command stream. In: commands and leases. Out: frames for an executor, and the values that it replies."""
