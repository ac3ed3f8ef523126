"""What ServerlessLoRA's text says of its figures, and its tables (arXiv 2505.14468). Numbers that it has
in pictures only are not here.
"""

from typing import Final, NamedTuple

KINDS: Final = ("Predictable", "Normal", "Bursty")

OWN: Final = "ServerlessLoRA"


class Row(NamedTuple):
    """Of Table 1: for the three workloads, of the 7B and of the 13B functions."""

    e2e_ms: tuple[tuple[float, float, float], tuple[float, float, float]]
    cost_usd: tuple[tuple[float, float, float], tuple[float, float, float]]


TABLE_1: Final[dict[str, Row]] = {
    "vLLM-like": Row(((2395, 2425, 2509), (2458, 2441, 2573)), ((20.93, 20.93, 20.93), (42.96, 42.96, 42.96))),
    "dLoRA-like": Row(((2518, 2589, 2793), (2672, 2683, 2856)), ((7.32, 7.32, 7.32), (11.40, 11.40, 11.40))),
    "InstaInfer-like": Row(((3811, 4512, 5620), (5777, 7318, 7986)), ((24.32, 32.68, 24.73), (53.30, 51.46, 36.58))),
    "ServerlessLLM-like": Row(((3807, 4569, 5168), (4733, 5690, 6474)), ((24.29, 33.10, 22.74), (43.67, 40.01, 29.65))),
    OWN: Row(((2922, 3061, 3050), (3166, 3338, 3631)), ((4.66, 5.54, 3.35), (7.30, 5.87, 4.16))),
}

TABLE_3: Final[dict[str, tuple[float, float, float]]] = {
    "ServerlessLoRA-like": (576, 2977, 7.53),
    "NBS: no shared backbone": (2608, 4959, 12.55),
    "NPL: nothing pre-loaded": (1345, 3747, 9.48),
    "NDO: nothing offloaded": (1047, 3328, 8.42),
    "NAB 1: no batches": (1386, 3799, 9.61),
    "NAB 2: 10, 500 ms": (693, 3425, 8.66),
    "NAB 3: 20, 1000 ms": (721, 3526, 8.92),
}
"""TTFT and E2E in ms, cost in $ ("Normal", all eight functions)."""

LESS_TTFT: Final = 0.86
LESS_COST: Final = 0.89
FASTER: Final = {"ServerlessLLM-like": 4.7, "InstaInfer-like": 7.1}
"""Up to so many times in the time to the first token (§6.2), 86 % less; and 89 % less cost."""

MORE_TPOT: Final = 1.12
BETTER: Final = {"ServerlessLLM-like": 19.3, "InstaInfer-like": 12.7}
"""Times in cost-effectiveness, at most (§6.4)."""

LEFT_8A: Final = 0.09
"""Of a request with InstaInfer's best case, that is cold start (§6.3)."""

THROUGHPUT: Final = 547 / 331
BATCHES: Final = (73, 32)
"""Table 2: tokens per second to the baselines', and the peak batches."""

LATE: Final = {OWN: 0.10, "ServerlessLLM-like": 0.45, "InstaInfer-like": 0.58}
"""First tokens that were late, at most (§6.8)."""
