"""Environment variables for OpenMP: how its threads wait for each other in processes that compute for a node."""

from typing import Final

WAITING: Final = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""Asleep, else they take the cores from whoever computes; but GNU's wait awake for some 50 us first, which is about the
time between the parts of a language model's layer, and what it costs to be woken.
"""
