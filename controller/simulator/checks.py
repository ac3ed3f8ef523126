"""Checks of single values of a scenario, which know how to name them: pure. Owns the units of times."""

import re
from typing import Final

from dormouse.controller.simulator.tree import Size, Time
from dormouse.core.config import parse_nbytes
from dormouse.schemas.errors import ConfigError

MAX_S: Final = 1e9
"""Thirty years: more is a slip, and much more is no float."""

_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Checks:
    """``origin`` is the file. All raise ConfigError."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def need(self, right: bool, key: str, found: object, cure: str) -> None:
        if not right:
            raise ConfigError(f"{self.origin}: {key} is {found}; {cure}")

    def nbytes(self, key: str, value: Size) -> int:
        try:
            nbytes = parse_nbytes(value)
        except ConfigError as error:
            raise ConfigError(f"{self.origin}: {key}: {error}") from None
        self.need(nbytes > 0, key, value, "write more than 0 bytes")
        return nbytes

    def seconds(self, key: str, value: Time) -> float:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|)\s*", str(value))
        cure = "write a number above 0 and one of us, ms, s, m, h"
        if match is None:
            raise ConfigError(f"{self.origin}: {key} is {value!r}; {cure}")
        seconds = float(match[1]) * _UNITS_S[match[2]]
        self.need(0.0 < seconds <= MAX_S, key, repr(value), f"{cure}, at most 30 years")
        return seconds
