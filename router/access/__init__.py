"""Who may what. In: what a request or a connection says of its caller. Out: a caller with its rights, or a refusal."""
