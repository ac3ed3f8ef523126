"""The front door. In: TCP connections, which may be hostile. Out: requests of functions, and answers in HTTP."""
