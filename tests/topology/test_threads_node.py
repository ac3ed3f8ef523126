"""Threads and worker processes of a function on a real node."""

from collections.abc import Iterator

import pytest

from benchmarks.nodes.testnode import TestNode, running_node

FUNCTION = """
    import threading, torch
    from torch.utils.data import DataLoader, Dataset

    class Squares(Dataset):
        def __len__(self):
            return 20
        def __getitem__(self, index):
            return torch.full((3,), float(index)) ** 2, index

    def load():
        return torch.eye(3).to("cuda")

    def collate(items):
        return torch.stack([item for item, _ in items]), [index for _, index in items]

    def loaded(state, workers, pinned):
        loader = DataLoader(
            Squares(), batch_size=6, num_workers=workers, collate_fn=collate, pin_memory=pinned,
            multiprocessing_context="fork" if workers else None,
        )
        total, seen = torch.zeros(3, device="cuda"), []
        for batch, indices in loader:
            total += (batch.to("cuda", non_blocking=True) @ state).sum(0)
            seen += indices
        return [total.tolist(), seen]

    def straggle(state):
        while True:
            (state * 2).sum().item()

    def handle(state, request):
        if request == "straggle":
            threading.Thread(target=straggle, args=(state,)).start()
        else:
            return loaded(state, *request)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "256MiB"\npoison = true\n') as running:
        running.deployed("threads", FUNCTION, timeout="60s")
        yield running


@pytest.mark.parametrize(("workers", "pinned"), [(0, True), (2, False), (2, True)])
def test_n2_a_data_loader_with_workers(node: TestNode, workers: int, pinned: bool) -> None:
    total = float(sum(number**2 for number in range(20)))
    assert node.result("threads", [workers, pinned]) == [[total] * 3, list(range(20))]


def test_n2_a_thread_that_outlives_its_request_is_told_by_name(node: TestNode) -> None:
    """It computes without a pause, so also when the request ends."""
    assert node.result("threads", "straggle") is None
    node.wait(lambda: "NoLease: cuda was used outside of load() and handle()" in node.logs(20_000), 60, "its error")
    assert node.result("threads", [0, False])[1] == list(range(20)), "the function goes on"
