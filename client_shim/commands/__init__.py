"""Turns an operation into a command. In: an operator and its arguments. Out: a plan, with its results' geometry."""
