"""Checkpoints and pinned batches on a real node: in the confinement, with the store, over leases."""

from benchmarks.nodes.testnode import running_node

FUNCTION = """
import io
import torch
from torch.utils.data import DataLoader, TensorDataset

def load():
    # A checkpoint as a GPU machine writes it is read in load(), before there is any lease.
    file = io.BytesIO()
    real = torch.serialization.location_tag
    torch.serialization.location_tag = lambda storage: "cuda:0"
    torch.save({"weight": torch.full((2, 3), 2.0), "bias": torch.zeros(2)}, file)
    torch.serialization.location_tag = real
    file.seek(0)
    state = torch.load(file)
    assert all(value.is_cuda for value in state.values())
    model = torch.nn.Linear(3, 2).to("cuda")
    model.load_state_dict(state)
    return model

def handle(model, request):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "view": model.weight[1:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    shares = loaded["view"].untyped_storage() == loaded["model"]["weight"].untyped_storage()
    file.seek(0)
    host = torch.load(file, map_location="cpu")
    data = TensorDataset(torch.ones(4, 3))
    loader = DataLoader(data, batch_size=2, pin_memory=True, num_workers=request["workers"])
    pinned, results = True, []
    with torch.no_grad():
        for (batch,) in loader:
            pinned = pinned and batch.is_pinned()
            results += model(batch.to("cuda", non_blocking=True)).sum(1).tolist()
    return {
        "cuda": loaded["model"]["weight"].is_cuda,
        "shares": shares,
        "host": host["model"]["weight"].sum().item(),
        "accelerator": str(torch.accelerator.current_accelerator()),
        "pinned": pinned,
        "results": results,
    }
"""


def test_checkpoints_and_pinned_batches() -> None:
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\npoison = true\n') as node:
        node.deployed("files", FUNCTION)
        for workers in (0, 1):
            assert node.result("files", {"workers": workers}) == {
                "cuda": True,
                "shares": True,
                "host": 12.0,
                "accelerator": "cuda",
                "pinned": True,
                "results": [12.0] * 4,
            }
