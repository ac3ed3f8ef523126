"""How far the results of benchmarks.serverless_lora_tables move with each constant, one at a time, by a fifth.

    python -m benchmarks.serverless_lora_sensitivity --data DIR [--quick] [--write] [--out FILE]

The workload is the first 800 requests of "Normal". ``--write`` writes the largest moves into docs/papers.md. In full it
takes a minute of a processor, with ``--quick`` ten seconds.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.papers_tables import write
from benchmarks.report import arguments, report
from benchmarks.serverless_lora_figures import effectiveness, table
from benchmarks.serverless_lora_systems import ABLATIONS, IDLE_MODE, SYSTEMS, Constants, Run, run_class
from benchmarks.serverless_lora_workload import lengths

ROOT: Final = Path(__file__).parents[1]

BY: Final = 0.2

SOME: Final = 800
"""Requests of each run: the first ones of the workload."""

LLM, VLLM, OURS, LITERAL = "ServerlessLLM-like", "vLLM-like", "Dormouse", "Eq. 3, else as Dormouse"
APART: Final = "NBS: no shared backbone"

RESULTS: Final[dict[str, Callable[[Mapping[str, Run], float], float]]] = {
    f"TTFT, {LLM} ÷ Dormouse": lambda runs, idle: _ttft(runs, LLM) / _ttft(runs, OURS),
    "TTFT, NBS ÷ Dormouse": lambda runs, idle: _ttft(runs, APART) / _ttft(runs, OURS),
    "TTFT, Eq. 3 ÷ Dormouse": lambda runs, idle: _ttft(runs, LITERAL) / _ttft(runs, OURS),
    "TTFT of Dormouse, ms": lambda runs, idle: _ttft(runs, OURS),
    "E2E of Dormouse, ms": lambda runs, idle: runs[OURS].by["all"].e2e_ms,
    f"cost, {LLM} ÷ Dormouse": lambda runs, idle: runs[LLM].cost_cny(idle) / runs[OURS].cost_cny(idle),
    f"cost, {VLLM} ÷ Dormouse": lambda runs, idle: runs[VLLM].cost_cny(idle) / runs[OURS].cost_cny(idle),
    f"cost-effectiveness, Dormouse ÷ {LLM}": lambda runs, idle: (
        effectiveness(runs[OURS], "all", idle) / effectiveness(runs[LLM], "all", idle)
    ),
    f"first tokens late, {LLM}, %": lambda runs, idle: 100 * runs[LLM].by["all"].late,
}


def _ttft(runs: Mapping[str, Run], name: str) -> float:
    return runs[name].by["all"].ttft_ms


def changed(base: Constants, name: str) -> list[tuple[str, Constants]]:
    """A fifth less and more; of how many instances there are one less and more, and of the price of idleness Alibaba's
    idle mode.
    """
    if name == "idle":
        return [(f"{IDLE_MODE:.2f}", base._replace(idle=IDLE_MODE))]
    value = getattr(base, name)
    if name in ("batch", "instances"):  # of four, a fifth would be none
        return [(f"{each:g}", base._replace(**{name: each})) for each in (value - 1, value + 1)]
    return [(f"{by:+.0%}", base._replace(**{name: value * (1 + by)})) for by in (-BY, BY)]


def main() -> None:
    parser = arguments(__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="where the arrivals and lengths are")
    parser.add_argument("--write", action="store_true", help="into docs/papers.md")
    args = parser.parse_args()
    pairs, most, base = lengths(args.data), 100 if args.quick else SOME, Constants()

    known = SYSTEMS | ABLATIONS

    def results(constants: Constants) -> dict[str, float]:
        runs = {
            name: run_class(known[name], "Normal", args.data, pairs, most, constants)
            for name in (LLM, VLLM, OURS, LITERAL, APART)
        }
        return {name: of(runs, constants.idle) for name, of in RESULTS.items()}

    one = results(base)
    moves: dict[str, dict[str, dict[str, float]]] = {}
    for name in ("library_s", "kept_s") if args.quick else Constants._fields:
        for how, constants in changed(base, name):
            moves.setdefault(name, {})[how] = results(constants)
            print(name, how, {key: round(value, 3) for key, value in moves[name][how].items()}, flush=True)
    text = show(one, moves)
    print(f"\n{text}")
    if args.write and write(ROOT / "docs" / "papers.md", {"lora-sensitivity": text}):
        print("docs/papers.md has no place for lora-sensitivity")
    report([], args, {"base": one, "moves": moves})


def show(one: Mapping[str, float], moves: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The three constants that move each result most."""
    rows = [["result", "base", "moved most by", "next", "next"]]
    for name, value in one.items():
        found = [
            (abs(each[name] / value - 1) if value else 0.0, f"{constant} {how}", each[name])
            for constant, by in moves.items()
            for how, each in by.items()
        ]
        best = [f"{what}: {_number(then)}" for _, what, then in sorted(found)[::-1][:3]]
        rows.append([name, _number(value), *best, *[""] * (3 - len(best))])
    return table(rows)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
