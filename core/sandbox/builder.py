"""Builds an environment, in a confined child of a zygote, which does this instead of a function's work.

pip reports the packages that are missing in the node's own environment (nothing is installed), then installs exactly
those into the folder that the router has made, by hash. Libraries that the zygote has imported already are held at
their version: an instance could not have another one. Ends with a `BuildResult` in that folder; pip's output goes to
the log.
"""

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dormouse.core.requirements import CUDA
from dormouse.core.sandbox.confinement import ENVIRONMENT
from dormouse.schemas.messages.zygote import BuildOrder

RESULT: Final = "result.json"
SITE: Final = "site"
WITHOUT_CUDA: Final = {
    "faiss-gpu": "faiss-cpu",
    "faiss-gpu-cu12": "faiss-cpu",
    "onnxruntime-gpu": "onnxruntime",
    "paddlepaddle-gpu": "paddlepaddle",
    "tensorflow": "tensorflow-cpu",
    "xgboost": "xgboost-cpu",
}
"""Of packages that bring parts of CUDA, those that are the same without."""

WORDS: Final = 3000
"""Of pip's last words, at most."""


class BuildFailed(Exception):
    """``code`` says why, the text what to do."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def build(order: BuildOrder, requirements: bytes, channel_fd: int) -> NoReturn:
    """See the module. Does not return."""
    place = Path(os.environ[ENVIRONMENT])
    try:
        result = _built(place, order, requirements, _listen(channel_fd) if order.way_out else "")
    except BuildFailed as failure:
        result = {"code": failure.code, "text": str(failure)}
    except OSError as error:
        result = {"code": "build_failed", "text": f"{error.filename}: {error.strerror}"}
    try:
        (place / RESULT).write_text(json.dumps(result))
    finally:
        sys.stdout.flush()
        os._exit(0)


def _listen(channel_fd: int) -> str:
    """The address at which the way out (way_out.py) answers from now on."""
    with socket.socket(fileno=channel_fd) as channel, socket.create_server(("127.0.0.1", 0)) as listener:
        socket.send_fds(channel, [b" "], [listener.fileno()])
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _built(place: Path, order: BuildOrder, requirements: bytes, proxy: str) -> dict[str, Any]:
    """Raises BuildFailed, OSError."""
    held = _held()
    wanted, constraints, report = place / "requirements.txt", place / "constraints.txt", place / "report.json"
    wanted.write_bytes(requirements)
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(held.items())))
    (place / "tmp").mkdir()
    os.environ["TMPDIR"] = str(place / "tmp")  # a wheel may have gigabytes, and all other places are memory
    pip = _Pip(order, proxy)
    print("the node looks for what the function needs", flush=True)
    pip.run("install", "--dry-run", "--report", str(report), "-r", str(wanted), "-c", str(constraints))
    found = json.loads(report.read_text())["install"]
    lines = [_locked(each, found, held) for each in found]
    (place / SITE).mkdir()
    if lines:
        lock = place / "lock.txt"
        lock.write_text("".join(f"{line}\n" for line in lines))
        pip.run("install", "--no-deps", "--require-hashes", "--target", str(place / SITE), "-r", str(lock))
    names = {entry.name.removesuffix(".py").partition(".")[0] for entry in (place / SITE).iterdir()}
    return {"code": "", "lock": lines, "names": sorted(name for name in names if name.isidentifier())}


def _held() -> dict[str, str]:
    """Versions of the distributions of which a module has been imported, by their names."""
    imported = {name.partition(".")[0] for name in sys.modules}
    found: dict[str, str] = {}
    for module, names in importlib.metadata.packages_distributions().items():
        if module in imported:
            found |= {str(canonicalize_name(name)): importlib.metadata.version(name) for name in names}
    return {name: version for name, version in found.items() if name not in ("pip", "dormouse")}


def wanting(name: str, report: list[dict[str, Any]]) -> list[str]:
    """The chain that brings a package, by pip's report: a requirement of the function's first, the one that names it
    last.
    """
    needs = {
        str(canonicalize_name(each["metadata"]["name"])): {
            str(canonicalize_name(Requirement(said).name)) for said in each["metadata"].get("requires_dist", [])
        }
        for each in report
    }
    asked = {str(canonicalize_name(each["metadata"]["name"])) for each in report if each.get("requested")}
    chains, seen = [[name]], {name}
    for chain in chains:
        if chain[0] in asked:
            return chain[:-1]
        more = [each for each, named in needs.items() if chain[0] in named and each not in seen]
        seen.update(more)
        chains += [[each, *chain] for each in more]
    return chains[-1][:-1]


def _instead(name: str, report: list[dict[str, Any]]) -> str:
    """Advice about a part of CUDA."""
    chain = wanting(name, report)
    if not chain:
        return "leave it out"
    why = ", ".join(f"{one} wants {other}" for one, other in pairwise([*chain, name]))
    for each in chain:
        if each in WITHOUT_CUDA:
            return f"{why}: write {WITHOUT_CUDA[each]} instead, which is the same without CUDA"
    return f"{why}: leave {chain[0]} out, or write a build of it without CUDA"


def _locked(found: dict[str, Any], report: list[dict[str, Any]], held: dict[str, str]) -> str:
    """A line of the lock file. Raises BuildFailed for what cannot be in an environment."""
    name, version = str(canonicalize_name(found["metadata"]["name"])), found["metadata"]["version"]
    if CUDA.fullmatch(name):
        text = (
            f"the requirements bring {name} {version}, a part of CUDA, which no instance has: it computes on GPUs "
            f"through the node's torch {held.get('torch', '')}; {_instead(name, report)}"
        )
        raise BuildFailed("cuda_refused", text)
    if name in held:
        text = f"the requirements bring {name} {version}, but the node's {held[name]} is in use; allow that version"
        raise BuildFailed("version_held", text)
    if found.get("is_direct"):
        raise BuildFailed("bad_requirements", f"{name} comes from an address, not from the index; write NAME==VERSION")
    hashes = found["download_info"].get("archive_info", {}).get("hashes", {})
    return " ".join([f"{name}=={version}", *(f"--hash={kind}:{value}" for kind, value in sorted(hashes.items()))])


class _Pip:
    """pip of the functions' interpreter."""

    def __init__(self, order: BuildOrder, proxy: str = "") -> None:
        self._order = order
        links = [word for link in order.find_links for word in ("--find-links", link)]
        self._source = ["--index-url", order.index, *links] if order.index else ["--no-index", *links]
        quiet = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        quiet |= {"PIP_NO_CACHE_DIR": "1", "PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_PROGRESS_BAR": "off"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        out = dict.fromkeys(("PIP_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy)
        self._environment = kept | quiet | order.variables | (out if proxy else {})

    def run(self, *words: str) -> None:
        """Its output is printed as it comes. Raises BuildFailed."""
        only = [] if self._order.sources else ["--only-binary", ":all:"]
        said = self._said([*words, *only, *self._source, "--no-color"])
        if said is not None:
            raise self._failure(said)

    def _said(self, words: list[str], shown: bool = True) -> str | None:
        """Its last words, if it has failed."""
        command = [sys.executable, "-P", "-m", "pip", *words]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._environment,
        ) as process:
            assert process.stdout is not None
            said = ""
            for line in process.stdout:
                if shown and not line.startswith(("Requirement already satisfied", "Looking in ")):
                    print(line, end="", flush=True)
                said = (said + line)[-WORDS:]
        return said if process.returncode else None

    def _failure(self, said: str) -> BuildFailed:
        """Why it has failed, in our words where it can be said better, and in its own."""
        errors = "\n".join(line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: "))
        errors = errors or said.strip()
        missing = re.search(r"No matching distribution found for ([A-Za-z0-9._-]+)", said)
        refused = re.search(r"((\S+) is neither the index nor in \[environments\] hosts)", said)
        if refused is not None:
            text = f"the build wanted to reach another host: {refused[1]}; add {refused[2]!r} there if it may"
            return BuildFailed("host_refused", text)
        none = missing is not None and "(from versions: none)" in said
        broken = re.search(r"(?:after connection broken by .*?|cannot be reached: )(\[Errno [^\]]*\] [^'\")]*)", said)
        if none and broken is not None:
            text = f"the package index cannot be reached ({broken[1]}); [environments] index in the node file names it"
            return BuildFailed("index_unreachable", text)
        if missing is not None and none and not self._order.sources and self._has_sources(missing[1]):
            text = (
                f"{missing[1]} has no wheel for Python {sys.version_info[0]}.{sys.version_info[1]} on this machine, "
                "only sources, whose build runs their code and may need a compiler: name a version that has one, or "
                "deploy with --allow-build where the node file has [environments] builds = true"
            )
            return BuildFailed("needs_build", text)
        if (held := re.search(r"\(constraint\) ([A-Za-z0-9._-]+)==(\S+)", said)) is not None:
            code = "torch_held" if held[1] == "torch" else "version_held"
            why = said[said.find("The conflict is caused by:") :].partition("\n\n")[0]
            text = f"the node's {held[1]} {held[2]} is in use, and another cannot be: {' '.join(why.split())}"
            return BuildFailed(code, text)
        if missing is not None or "ResolutionImpossible" in said or "conflicting dependencies" in said:
            return BuildFailed("unsolvable", f"the requirements cannot be solved: {said.strip()[-1500:]}")
        if "No module named pip" in said:
            return BuildFailed("no_pip", f"{sys.executable} has no pip, which builds environments; install it there")
        if "File too large" in said:
            return BuildFailed("environment_too_large", errors)
        if "No space left" in said:
            return BuildFailed("disk_full", f"the disk of [node] state is full: {errors}")
        return BuildFailed("build_failed", f"pip has failed: {errors}")

    def _has_sources(self, name: str) -> bool:
        """Whether there is anything of that name; nothing of it is run."""
        return self._said(["index", "versions", name, *self._source], shown=False) is None
