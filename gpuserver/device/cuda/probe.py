"""Probe for GPUs that CUDA can drive on this machine, or the reason why there are none. Looks, takes nothing.

Imports neither torch nor, before it is asked, CUDA's bindings: ``python -m dormouse.gpuserver.device.cuda.probe
[--open]`` prints one line of JSON, for processes that must not load a driver themselves (core/gpus.py). With ``--open``
each GPU is given a context for a moment.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dormouse.core.gpus import GpuState
from dormouse.gpuserver.device.cuda import nvml
from dormouse.schemas.messages import GpuPlace

NO_DEVICE: Final = 100
REMEDIES: Final = {
    2: "other processes have filled it: end them (nvidia-smi shows them), or leave it out by CUDA_VISIBLE_DEVICES",
    46: "another process has it for itself: end that, or allow others (nvidia-smi -c DEFAULT)",
    NO_DEVICE: "the driver shows this process none: see `nvidia-smi -L`, and what a container was given",
    214: "its memory has errors that cannot be corrected: reset it, or leave it out by CUDA_VISIBLE_DEVICES",
    802: "what connects the GPUs is not up: start nvidia-fabricmanager",
    803: "the driver's parts are of different versions: restart the machine",
    804: "the driver is too old for these libraries: install a newer one",
}
"""Advice on the codes with which a driver or a GPU cannot be used at all."""


@dataclass(frozen=True)
class Probe:
    """The findings. ``reason`` says why there are no ``gpus``, else it is empty."""

    gpus: tuple[str, ...] = ()
    driver: str = ""  # the CUDA version that the driver can do, "13.0"
    bindings: str = ""
    reason: str = ""


def probe() -> Probe:
    """Ask the driver; never raises."""
    try:
        bindings = str(importlib.import_module("cuda.bindings").__version__)
        cu: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        return Probe(reason=f"cuda-bindings cannot be imported ({error}); install dormouse[cuda]")
    try:
        code = int(cu.cuInit(0)[0])
        if code:
            why = hidden() if code == NO_DEVICE else ""
            reason = f"the driver refuses: cuInit gives {_named(cu, code)}{why or '; ' + remedy(code)}"
            return Probe(bindings=bindings, reason=reason)
        code, version = cu.cuDriverGetVersion()
        number = 0 if int(code) else int(version)
        driver = f"{number // 1000}.{number % 1000 // 10}"
        code, count = cu.cuDeviceGetCount()
        if int(code) or not count:
            found = f"cuDeviceGetCount gives {_named(cu, int(code))}" if int(code) else "the driver finds no GPU"
            reason = found + hidden()
            return Probe(driver=driver, bindings=bindings, reason=reason)
        gpus = tuple(_name(cu, ordinal) for ordinal in range(int(count)))
        if torch_is_for_cpus() and not device_memory_is_host_memory():
            torch = version_of("torch")
            reason = f"there is {gpus[0]}, but torch {torch} is built without CUDA; install one with CUDA"
            return Probe(driver=driver, bindings=bindings, reason=reason)
        if (built := torch_cuda()) and int(driver.split(".")[0]) < int(built.split(".")[0]):
            reason = (
                f"there is {gpus[0]}, but its driver does CUDA {driver}, and torch {version_of('torch')} is for "
                f"{built}: install a newer driver, or a torch for CUDA {driver.split('.')[0]}"
            )
            return Probe(driver=driver, bindings=bindings, reason=reason)
        return Probe(gpus, driver, bindings)
    except RuntimeError as error:  # also what the bindings raise without a driver, by any of its names
        return Probe(bindings=bindings, reason=f"no driver: {' '.join(str(error).split())[:200]}")
    except (ValueError, KeyError) as error:  # a code that is newer than the bindings
        return Probe(bindings=bindings, reason=f"the driver refuses: unknown code: {error}")


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(none)"


def remedy(code: int) -> str:
    return REMEDIES.get(code, "the kernel's log says more (NVRM: Xid)")


def hidden() -> str:
    """A note on GPUs that the environment may hide; "" if it hides none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name others)"


def torch_cuda() -> str:
    """The CUDA version that torch is built for, "" if for none; not by importing it."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    text = file.read_text(errors="replace") if file is not None and file.exists() else ""
    found = re.search(r"""^cuda(?:: [^=]*)? = ['"]([0-9.]+)['"]""", text, re.M)
    return found[1] if found else ""


def torch_is_for_cpus() -> bool:
    """By the name of its version, because importing it takes seconds. Whether another one can use the GPU is known
    when it tries (torch_adapter.py).
    """
    return version_of("torch").endswith("+cpu")


def device_memory_is_host_memory() -> bool:
    """Only the fake driver says so (tests/fake_cuda): by a symbol that no real one has."""
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "fake_cuda_fail")
    except OSError:
        return False


def _name(cu: Any, ordinal: int) -> str:
    code, device = cu.cuDeviceGet(ordinal)
    if int(code):
        return f"GPU {ordinal}"
    code, name = cu.cuDeviceGetName(256, device)
    return f"GPU {ordinal}" if int(code) else bytes(name).split(b"\0")[0].decode(errors="replace")


def error_name(cu: Any, code: int) -> str:
    """``CUDA_ERROR_...``, or "" if these bindings do not know the code."""
    try:
        failed, name = cu.cuGetErrorName(cu.CUresult(code))
    except (ValueError, KeyError, RuntimeError):
        return ""
    return "" if int(failed) or name is None else bytes(name).decode()


def _named(cu: Any, code: int) -> str:
    name = error_name(cu, code)
    return f"{name} ({code})" if name else f"code {code}"


def places(count: int) -> list[GpuPlace]:
    """The places of CUDA's first ``count`` GPUs, after a probe that found so many."""
    cu: Any = importlib.import_module("cuda.bindings.driver")
    found = []
    for ordinal in range(count):
        code, device = cu.cuDeviceGet(ordinal)
        if not int(code):
            code, uuid = cu.cuDeviceGetUuid(device)
        if int(code):
            found.append(GpuPlace(uuid="", reason=f"the driver does not name GPU {ordinal}: {_named(cu, int(code))}"))
        else:
            found.append(nvml.look(nvml.named(bytes(uuid.bytes))))
    return found


def opened(ordinal: int) -> GpuState:
    """The state of a GPU, from a context that it is given for a moment."""
    cu: Any = importlib.import_module("cuda.bindings.driver")
    attribute = cu.CUdevice_attribute
    asked = (
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )

    def result(name: str, *arguments: Any) -> Any:
        code, *results = getattr(cu, name)(*arguments)
        if int(code):
            raise RuntimeError(f"{name} gives {_named(cu, int(code))}; {remedy(int(code))}")
        return results[0] if len(results) == 1 else results

    state = GpuState()
    try:
        device = result("cuDeviceGet", ordinal)
        major, minor = (result("cuDeviceGetAttribute", each, device) for each in asked)
        state.capability = (major, minor)
        context = result("cuDevicePrimaryCtxRetain", device)
        try:
            result("cuCtxSetCurrent", context)
            state.free_nbytes, state.total_nbytes = result("cuMemGetInfo")
        finally:
            cu.cuDevicePrimaryCtxRelease(device)
    except (RuntimeError, ValueError, KeyError) as error:  # of the bindings too, for a code that is newer than they
        state.error = str(error)
    return state


def main() -> int:
    found = probe()
    told = asdict(found) | {"places": places(len(found.gpus)) if found.gpus else []}  # else there may be no bindings
    if "--open" in sys.argv[1:]:
        told["states"] = [opened(ordinal) for ordinal in range(len(found.gpus))]
    print(msgspec.json.encode(told).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
