"""Two functions with two versions of a library on one node, and what the second zygote costs while it is warm.

python -m benchmarks.environments [--index URL] [--library transformers] [--versions 4.57.3 5.23.0]
"""

import argparse
import re
import time
from pathlib import Path

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core import procfs
from dormouse.core.sandbox.world import PLAIN_ZYGOTE, ZYGOTE

FUNCTION = """
import {library}
def handle(state, request):
    return {library}.__version__
"""


def pss_nbytes(node: TestNode, role: str) -> int:
    """Of a zygote, pages that it shares with other processes counted in proportion."""
    stub = node.pids()[role]
    pids = [stub, *(pid for pid in procfs.children(stub) if procfs.inner_pid(pid) == 1)]
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(found) << 10 for text in texts for found in re.findall(r"^Pss:\s+(\d+)", text, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", default="https://pypi.org/simple")
    parser.add_argument("--find-links", default="")
    parser.add_argument("--library", default="transformers")
    parser.add_argument("--versions", nargs=2, default=["4.57.3", "5.23.0"])
    arguments = parser.parse_args()
    links = f'find_links = ["{arguments.find_links}"]\n' if arguments.find_links else ""
    own = f'[environments]\nindex = "{arguments.index}"\nidle_ms = 5000\n{links}'
    warm = f'[sandbox]\nwarm = ["{arguments.library}"]\n'
    with running_node(f'[gpu]\ncount = 1\nmemory = "256MiB"\nthreads = 1\n{own}{warm}') as node:
        for version in arguments.versions:
            name, began_s = f"v{version.replace('.', '-')}", time.monotonic()
            source = FUNCTION.format(library=arguments.library)
            node.deployed(name, source, requirements=f"{arguments.library}=={version}\n")
            took_s = time.monotonic() - began_s
            began_s = time.monotonic()
            node.deployed(name, source, requirements=f"{arguments.library}=={version}\n")
            again_s = time.monotonic() - began_s
            print(f"{version}: deployed in {took_s:.1f} s, again in {again_s:.1f} s, answers {node.result(name, 0)}")
        for path in (node.state / "environments").iterdir():
            nbytes = sum(each.lstat().st_size for each in path.rglob("*"))
            print(f"environment {path.name}: {nbytes / 1e6:.0f} MB")
        for role in (ZYGOTE, PLAIN_ZYGOTE):
            if role in node.pids():
                print(f"{role}: {pss_nbytes(node, role) / 1e6:.0f} MB, shared pages counted once")
        for name in [row["name"] for row in node.admin.functions()]:
            node.remove(name)
        began_s = time.monotonic()
        node.wait(lambda: PLAIN_ZYGOTE not in node.pids(), 60, "the second zygote to end")
        print(f"{PLAIN_ZYGOTE} ended {time.monotonic() - began_s:.1f} s after its last function (idle_ms = 5000)")


if __name__ == "__main__":
    main()
