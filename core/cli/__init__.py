"""The `dormouse` command. Each command is one or two calls to a node, printed."""
