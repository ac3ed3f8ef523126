"""What becomes of requests, functions and instances: decisions alone. In: events, and the time. Out: actions."""
