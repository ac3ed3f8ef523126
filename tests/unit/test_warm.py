"""N4: whatever a library does at its import, the zygote becomes ready without it, and the reason is known."""

import subprocess
import sys
from pathlib import Path

import pytest

from dormouse.core import torchbuild
from dormouse.core.sandbox import preload, warming
from dormouse.core.sandbox.warming import START_ANEW, Warming

LIBRARIES = {
    "raises_import_error": "import nothing_of_that_name",
    "raises_runtime_error": "raise RuntimeError('operator torchvision::nms does not exist')",
    "raises_os_error": "raise OSError('libcudart.so.13: cannot open shared object file')",
    "raises_system_exit": "import sys\nsys.exit('no licence')",
    "leaves": "import os\nos._exit(0)",
    "crashes": "import ctypes\nctypes.string_at(1)",
    "hangs": "while True:\n    pass",
    "hangs_in_c": "import ctypes\nctypes.PyDLL(None).pause()",  # holding the interpreter's lock
    "keeps_a_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()",
    "prints": "print('hello')\nimport sys\nprint('hello', file=sys.stderr)",
    "works": "",
}
# The setting up alone: the imports that every zygote makes are not in question here, and cost seconds.
PROGRAM = """
import sys
from pathlib import Path
from dormouse.core.sandbox import preload
from dormouse.core.sandbox import warming
preload.LONGEST_S = preload.STUCK_S = warming.LONGEST_S = 3.0
preload.mismatches = list
found = warming.Warming.read(Path(sys.argv[1]))
for name in sys.argv[2:]:
    if name not in found.left_out and preload._installed(name):
        preload._import(name, found)
found.end()
print("\\nready with", *[name for name in sys.argv[2:] if name in sys.modules])
"""


def starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Warming, str]:
    """Statuses of zygotes one after another until one is ready; what they noted; what the last one said."""
    for name, text in LIBRARIES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(warming, "LONGEST_S", 3.0)
    file = folder / "warming"
    command = [sys.executable, "-c", PROGRAM, str(file), *LIBRARIES, "not_installed.part"]
    statuses: list[int] = []
    for _ in range(len(LIBRARIES) + 1):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)
        statuses.append(done.returncode)
        if done.returncode == 0 and "ready with" in done.stdout:
            break
    return statuses, Warming.read(file), done.stdout


def test_n4_every_way_to_fail_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses, found, said = starts(tmp_path, monkeypatch)
    assert said.strip().splitlines()[-1] == "ready with prints works"
    reasons = found.left_out
    assert list(reasons) == [name for name in LIBRARIES if name not in ("prints", "works")]
    assert reasons["raises_import_error"] == "ModuleNotFoundError: No module named 'nothing_of_that_name'"
    assert reasons["raises_runtime_error"] == "RuntimeError: operator torchvision::nms does not exist"
    assert reasons["raises_os_error"] == "OSError: libcudart.so.13: cannot open shared object file"
    assert reasons["raises_system_exit"] == "SystemExit: no licence"
    for name in ("leaves", "crashes"):
        assert reasons[name].startswith("its import ended the interpreter; see zygote.err")
    for name in ("hangs", "hangs_in_c"):
        assert reasons[name].startswith("its import took longer than 3 s")
    assert reasons["keeps_a_thread"] == "its import leaves a thread running, which no fork would have"
    assert statuses == [*[START_ANEW] * 4, 0, -11, 1, 1, START_ANEW, 0]


def test_n4_waiting_for_a_processor_is_no_hanging(tmp_path: Path) -> None:
    """The same library, where the kernel says that it has waited for the processor all the time."""
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(3.5)")
    program = PROGRAM.replace("found =", "import time\npreload._queued_s = time.monotonic\nfound =", 1)
    for text, status in ((program, 0), (program.replace("time.monotonic\n", "lambda: 0.0\n"), 1)):
        command = [sys.executable, "-c", text, str(tmp_path / "warming"), "sleeps"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
        assert done.returncode == status, done.stderr
    assert preload._queued_s() > 0.0 or not Path("/proc/self/schedstat").exists()


def test_n4_a_build_for_another_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version, cuda in (("torchvision", "0.28.0", '"13.0"'), ("torch", "2.13.0+cpu", "None")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('this is not imported')")
        text = f"__version__ = '{version}'\ngit_version = 'abc'\ncuda: Optional[str] = {cuda}\n"
        (tmp_path / name / "version.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = (
        "torchvision 0.28.0 is built for CUDA 13.0 and torch 2.13.0+cpu for the CPU: install both from one index "
        "(https://pytorch.org/get-started)"
    )
    assert torchbuild.mismatches() == [expected]
    assert preload._reason(RuntimeError("no nms")) == f"RuntimeError: no nms; {expected}"
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    assert torchbuild.mismatches() == []
