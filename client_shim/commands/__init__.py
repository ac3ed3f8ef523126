"""An operation as a command. In: an operator and its arguments. Out: a plan, with its results' geometry."""
