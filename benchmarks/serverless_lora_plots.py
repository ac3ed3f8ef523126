"""ServerlessLoRA's Figures 6 and 9 as one PNG file, in the colours of the simulator's own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.serverless_lora_figures import NAMES, SHOWN, effectiveness
from benchmarks.serverless_lora_systems import Run
from dormouse.controller.simulator.plots import COLOURS

DPI: Final = 85


def draw(runs: Mapping[str, Mapping[str, Run]], path: Path, idle: float) -> None:
    """Bars for each system: its mean time to the first token, and its cost-effectiveness beside vLLM's."""
    import matplotlib
    from matplotlib.figure import Figure as Sheet

    def ttft_ms(systems: Mapping[str, Run], of: str, name: str) -> float:
        return systems[of].by[name].ttft_ms

    def beside_vllm(systems: Mapping[str, Run], of: str, name: str) -> float:
        return effectiveness(systems[of], name, idle) / effectiveness(systems["vLLM-like"], name, idle)

    panels: dict[str, Callable[[Mapping[str, Run], str, str], float]] = {
        "Fig. 6: mean TTFT, ms": ttft_ms,
        "Fig. 9: cost-effectiveness ÷ vLLM-like's": beside_vllm,
    }
    groups = [(kind, name) for kind in runs for name in NAMES]
    width = 0.8 / len(SHOWN)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        sheet = Sheet((9.6, 3.4), dpi=DPI, layout="constrained")
        sheet.suptitle("ServerlessLoRA (simulated)", fontsize=9)
        for axes, (title, value) in zip(sheet.subplots(1, 2), panels.items(), strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(title, loc="left", fontsize=9)
            for index, of in enumerate(SHOWN):
                heights = [value(runs[kind], of, name) for kind, name in groups]
                at = [number + index * width for number in range(len(groups))]
                axes.bar(at, heights, width, color=COLOURS[index], label=of)
            ticks = [number + width * (len(SHOWN) - 1) / 2 for number in range(len(groups))]
            axes.set_xticks(ticks, [f"{kind}\n{name[-3:].strip('-')}" for kind, name in groups], fontsize=7)
        handles, labels = sheet.axes[0].get_legend_handles_labels()
        sheet.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        sheet.savefig(path, metadata={"Software": None})
