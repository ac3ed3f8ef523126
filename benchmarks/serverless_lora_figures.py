"""ServerlessLoRA's figures as tables, with what the paper says beside what the simulator has. Pure."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from benchmarks.serverless_lora_published import (
    BETTER,
    FASTER,
    LATE,
    LEFT_8A,
    LESS_COST,
    LESS_TTFT,
    MORE_TPOT,
    OWN,
    TABLE_1,
    TABLE_3,
)
from benchmarks.serverless_lora_systems import ABLATIONS, SYSTEMS, Constants, Parts, Run, parts, specs_of
from benchmarks.serverless_lora_workload import BACKBONES, Pairs

Runs = Mapping[str, Mapping[str, Run]]
"""By workload and system."""

NAMES: Final = [backbone.name for backbone in BACKBONES]

LIKE: Final = "ServerlessLoRA-like"
BASELINES: Final = ("InstaInfer-like", "ServerlessLLM-like")
SHOWN: Final = (*BASELINES, LIKE, "Dormouse")


def table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]])


def means(runs: Runs, value: str, title: str, digits: int = 0) -> str:
    """A mean of each workload and backbone (Figs. 6 and 7), and late first tokens (Fig. 12)."""
    rows = [[title, *SHOWN]]
    for kind, systems in runs.items():
        for name in NAMES:
            values = [getattr(systems[system].by[name], value) for system in SHOWN]
            style = ".1%" if value == "late" else f",.{digits}f"
            rows.append([f"{kind}, {name}", *(format(each, style) for each in values)])
    return table(rows)


def breakdown(pairs: Pairs, constants: Constants) -> str:
    """Fig. 8a: one invocation of a function that was prepared as its system can."""
    systems = SYSTEMS | ABLATIONS
    rows = [["Fig. 8a, s", *Parts._fields, "first token", "others", "of it cold start"]]
    for name, ahead in (("ServerlessLLM-like", 0), ("InstaInfer-like", 4), (LIKE, 5)):
        for number, backbone in enumerate(BACKBONES):
            spec = specs_of(systems[name], pairs, constants)[4 * number]
            assert spec.llm is not None
            each = parts(spec, systems[name], constants)
            cold = [0.0] * ahead + list(each)[ahead:]
            first_s = spec.llm.cost.stream_s(round(spec.llm.prompt.mean), 1, spec.llm.step_tokens)
            later_s = spec.llm.alone_s - first_s
            share = sum(cold) / (sum(cold) + first_s + later_s)
            cells = [f"{seconds:.2f}" for seconds in (*cold, first_s, later_s)]
            paper = f" ({LEFT_8A:.0%})" if name == "InstaInfer-like" else " (0 %)" if name == LIKE else ""
            rows.append([f"{name}, {backbone.name}", *(c.replace("0.00", "0") for c in cells), f"{share:.0%}{paper}"])
    return table([[cell.replace("_s", "") for cell in rows[0]], *rows[1:]])


def workload(systems: Mapping[str, Run], pairs: Pairs, constants: Constants) -> str:
    """Fig. 8b: the same, of all invocations of a workload."""
    known = SYSTEMS | ABLATIONS
    rows = [["Fig. 8b, s in all", "starts", *Parts._fields, "cold", "inference", "cold ÷ inference"]]
    for name in SHOWN:
        run, sums, starts = systems[name], [0.0] * len(Parts._fields), 0
        for number, backbone in enumerate(BACKBONES):
            spec = specs_of(known[name], pairs, constants)[4 * number]
            each = parts(spec, known[name], constants)
            began, loaded = run.held.began[backbone.name], run.held.loaded[backbone.name]
            if name == LIKE or not known[name].platform:  # a backbone that is not on that GPU, at most
                times = (0, 0, loaded, 0, 0)
            else:
                times = (loaded, loaded, loaded, loaded, began)
            starts += began if known[name].platform else loaded
            sums = [total + part * count for total, part, count in zip(sums, each, times, strict=True)]
        inference_s = sum(run.by[each].streams * run.by[each].e2e_ms / 1e3 for each in NAMES) - sum(sums)
        share = f"{sum(sums) / inference_s:.2f}"
        rows.append([name, f"{starts}", *(f"{each:,.0f}" for each in (*sums, sum(sums), inference_s)), share])
    return table([[cell.replace("_s", "") for cell in rows[0]], *rows[1:]])


def effectiveness(run: Run, backbone: str, idle: float) -> float:
    return 1.0 / (run.by[backbone].e2e_ms * run.cost_cny(idle, backbone))


def table_1(runs: Runs, idle: float) -> str:
    """Table 1 and Fig. 9: ours, and the paper's in parentheses. ServerlessLoRA's own stand beside both of its rows."""
    rows = [["backbone, workload", "system", "E2E ms", "cost CNY", "cost ÷ vLLM's", "cost-effectiveness ÷ vLLM's"]]
    for size, name in enumerate(NAMES):
        for number, (kind, systems) in enumerate(runs.items()):
            base = systems["vLLM-like"]
            for system in ("vLLM-like", "dLoRA-like", *SHOWN):
                run, paper, vllm = systems[system], TABLE_1[system if system in TABLE_1 else OWN], TABLE_1["vLLM-like"]
                e2e, cost = paper.e2e_ms[size][number], paper.cost_usd[size][number]
                theirs = (vllm.cost_usd[size][number], vllm.e2e_ms[size][number])
                ours = effectiveness(run, name, idle) / effectiveness(base, name, idle)
                ratio = run.cost_cny(idle, name) / base.cost_cny(idle, name)
                rows.append(
                    [
                        f"{name}, {kind}" if system == "vLLM-like" else "",
                        system,
                        f"{run.by[name].e2e_ms:,.0f} ({e2e:,.0f})",
                        f"{run.cost_cny(idle, name):,.0f}",
                        f"{ratio:.2f} ({cost / theirs[0]:.2f})",
                        f"{ours:.2f} ({theirs[0] * theirs[1] / cost / e2e:.2f})",
                    ]
                )
    return table(rows)


def ablations(systems: Mapping[str, Run], idle: float) -> str:
    """Table 3 and Fig. 10b; the paper's in parentheses."""
    rows = [["Normal, all functions", "TTFT ms", "E2E ms", "cost ÷ first row's", "cost-effectiveness ÷ first row's"]]
    one, first = systems[LIKE], TABLE_3[LIKE]
    for name in (*ABLATIONS, "Dormouse"):
        run, paper = systems[name], TABLE_3.get(name)
        better = effectiveness(run, "all", idle) / effectiveness(one, "all", idle)
        cells = (
            (f"{run.by['all'].ttft_ms:,.0f}", paper and f"{paper[0]:,.0f}"),
            (f"{run.by['all'].e2e_ms:,.0f}", paper and f"{paper[1]:,.0f}"),
            (f"{run.cost_cny(idle) / one.cost_cny(idle):.2f}", paper and f"{paper[2] / first[2]:.2f}"),
            (f"{better:.2f}", paper and f"{first[1] * first[2] / paper[1] / paper[2]:.2f}"),
        )
        rows.append([name, *(f"{ours} ({theirs})" if theirs else ours for ours, theirs in cells)])
    return table(rows)


def most(runs: Runs, of: Callable[[Mapping[str, Run], str], float]) -> tuple[float, str]:
    """The largest of a number over workloads and backbones, and where that is."""
    found = [(of(systems, name), f"{name}, {kind}") for kind, systems in runs.items() for name in NAMES]
    return max(found)


def claims(runs: Runs, idle: float) -> str:
    """What the paper says of itself, for its platform as we can make it, and for Dormouse."""

    def faster(base: str, who: str) -> Callable[[Mapping[str, Run], str], float]:
        return lambda systems, name: systems[base].by[name].ttft_ms / systems[who].by[name].ttft_ms

    def cheaper(base: str, who: str) -> Callable[[Mapping[str, Run], str], float]:
        return lambda systems, name: 1 - systems[who].cost_cny(idle, name) / systems[base].cost_cny(idle, name)

    def better(base: str, who: str) -> Callable[[Mapping[str, Run], str], float]:
        return lambda s, name: effectiveness(s[who], name, idle) / effectiveness(s[base], name, idle)

    def slower(base: str, who: str) -> Callable[[Mapping[str, Run], str], float]:
        return lambda systems, name: systems[who].by[name].tpot_ms / systems[base].by[name].tpot_ms

    def late(who: str) -> Callable[[Mapping[str, Run], str], float]:
        return lambda systems, name: systems[who].by[name].late

    whose = (LIKE, "Dormouse")
    rows = [["at most, of workloads and backbones", "paper", *whose]]

    def row(what: str, paper: str, of: Callable[[str], Callable[[Mapping[str, Run], str], float]], style: str) -> None:
        found = [most(runs, of(who)) for who in whose]
        rows.append([what, paper, *(f"{value:{style}} ({where})" for value, where in found)])

    for base in BASELINES:
        row(f"TTFT, times faster than {base}", f"{FASTER[base]}", partial(faster, base), ".1f")
    everyone = (*BASELINES, "vLLM-like", "dLoRA-like")
    for base in everyone:
        paper = f"{LESS_COST:.0%}" if base == BASELINES[0] else ""
        row(f"cost, less than {base}'s", paper, partial(cheaper, base), ".0%")
    for base in BASELINES:
        row(
            f"cost-effectiveness ÷ {base}'s", f"{BETTER[base]}", partial(better, base), ".1f"
        )  # fmt: skip
    row("TPOT ÷ ServerlessLLM-like's", f"{MORE_TPOT}", partial(slower, "ServerlessLLM-like"), ".2f")
    for who in BASELINES:
        value, where = most(runs, late(who))
        rows.append([f"first tokens late, {who}", f"{LATE[who]:.0%}", f"{value:.0%} ({where})", ""])
    row("first tokens late, its own", f"{LATE[OWN]:.0%}", late, ".1%")
    assert abs(1 - 1 / FASTER["InstaInfer-like"] - LESS_TTFT) < 0.01
    return table(rows)
