"""The executor's side of a command alone: frames of a forward, run by the interpreter, against the time of the
operators' own calls within them. ``interpreted``: commands that are told; ``replayed``: a sequence that came before,
computed ahead and then validated; ``captured``: the same, its sections computed as a whole.

The library is compiled anew with a clock around each boxed call; the clock's own time is measured and taken off. The
models are those of `benchmarks.recording`, whose kernels are tiny.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks.fuzz_record import loopback
from benchmarks.recording import models
from benchmarks.report import Goal, arguments, report
from dormouse.client_shim.commands import recorder
from dormouse.core.native import EXECUTOR, Extension
from dormouse.gpuserver.commands import fast_path

CLOCK: Final = """namespace {
int64_t boxed_ns = 0;
int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
template <typename Stack>
void timed(const c10::OperatorHandle& operation, Stack* stack) {
  const int64_t before_ns = now_ns();
  operation.callBoxed(stack);
  boxed_ns += now_ns() - before_ns;
}
PyObject* take_boxed(PyObject*, PyObject*) {
  const int64_t taken = boxed_ns;
  boxed_ns = 0;
  return PyLong_FromLongLong(taken);
}
"""
CALL: Final = "plan->operation->callBoxed(&step.stack);", "timed(*plan->operation, &step.stack);"
METHODS: Final = "PyMethodDef methods[] = {", 'PyMethodDef methods[] = {{"take_boxed", take_boxed, METH_NOARGS, ""},'
PATCHES: Final = {
    "plans.h": [("namespace {\n", CLOCK), ("#include <cstdint>\n", "#include <chrono>\n#include <cstdint>\n")],
    "steps.h": [],
    "program.h": [CALL],
    "fast_path.cpp": [CALL, METHODS],
}
WARM: Final = 12  # forwards: then a sequence is followed, and its sections are captured
CLOCKS: Final = 100_000


def clocked(folder: str) -> Any:
    """The library with a clock; it takes the place of the other."""
    for name, patches in PATCHES.items():
        text = (EXECUTOR.source.parent / name).read_text()
        for before, after in patches:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        (Path(folder) / name).write_text(text)
    extension = Extension("dormouse_fast_path", Path(folder) / "fast_path.cpp", "")
    extension.build()
    vars(fast_path)["EXECUTOR"] = extension
    return extension.load()


def clock_ns() -> float:
    """Of two looks at it, one of which falls outside what is measured."""
    begun = time.perf_counter_ns()
    for _ in range(CLOCKS):
        time.perf_counter_ns()
    looks = time.perf_counter_ns() - begun
    begun = time.perf_counter_ns()
    for _ in range(CLOCKS):
        pass
    return (looks - (time.perf_counter_ns() - begun)) / CLOCKS


class Way:
    """One world whose last forward is run again and again: its table is each time as it was before."""

    def __init__(
        self, model: nn.Module, run: Callable[[Any, Any], Any], given: torch.Tensor, operations: int, captures: bool
    ) -> None:
        templates = recorder.TemplateSettings(operations=operations)
        self.world = loopback().LoopbackWorld(templates=templates, captures=captures)
        there = copy.deepcopy(model).to("cuda")
        self.world.end_lease()
        self.world.begin_lease()
        executor = self.world.node.executors[0]
        self.interpreter = executor.interpreter
        self.table = self.interpreter.table.by_id
        for _ in range(WARM):
            sent = given.to("cuda")
            torch.cuda.synchronize()
            self.before, self.number = dict(self.table), self.interpreter._replies.frame
            executor.frames, executor.keep_frames = [], True
            answer = run(there, sent).cpu()
            self.frames = executor.frames
        torch.testing.assert_close(answer, run(model, given), msg="the frames are those of a right answer")

    def once(self, library: Any) -> tuple[float, float, int]:
        """Nanoseconds, those of boxed calls in it, and operations."""
        self.interpreter._templates.leave()
        self.table.clear()
        self.table.update(self.before)
        self.interpreter._replies.frame = self.number
        ran = self.interpreter.operations_run
        library.take_boxed()
        begun = time.perf_counter_ns()
        for frame in self.frames:
            self.interpreter.execute(frame)
            while self.interpreter.ahead():
                pass
        taken = time.perf_counter_ns() - begun
        return taken, library.take_boxed(), self.interpreter.operations_run - ran


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    rounds = 20 if args.quick else 300
    torch.set_num_threads(1)
    goals: list[Goal] = []
    everything: dict[str, Any] = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        library, look_ns = clocked(folder), clock_ns()
        for name, (model, run, given) in models().items():
            everything[name] = {}
            kinds = {"interpreted": (0, False), "replayed": (8, False), "captured": (8, True)}
            for kind, (operations, captures) in kinds.items():
                way = Way(model, run, given, operations, captures)
                try:
                    added, boxed = [], []
                    for number in range(rounds + 5):
                        taken_ns, boxed_ns, ran = way.once(library)
                        if number >= 5:
                            added.append((taken_ns - boxed_ns) / ran - look_ns)
                            boxed.append(boxed_ns / ran)
                finally:
                    way.world.close()
                everything[name][kind] = {
                    "added_us": statistics.median(added) / 1e3,
                    "boxed_us": statistics.median(boxed) / 1e3,
                    "operations": ran,
                }
            print(name, everything[name], flush=True)
            for kind, most in (("interpreted", 1.0), ("replayed", 0.3), ("captured", 0.3)):
                added_us = everything[name][kind]["added_us"]
                title = f"{name}: {kind}, µs beyond the boxed call"
                goals.append(Goal(name=title, goal=f"<= {most}", measured=added_us, met=added_us <= most))
    report(goals, args, everything)


if __name__ == "__main__":
    main()
