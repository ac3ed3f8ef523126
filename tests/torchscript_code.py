"""Code for TorchScript that names devices. Loaded anew by each test: what was compiled once knows its tensors."""

import torch


def moved(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        if x.is_cpu:
            x = x.to(like.device)
    return x


class Moving(torch.nn.Module):
    """Its code names devices, in every way that TorchScript has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str, float]:
        y = moved(x, self.linear.weight) + torch.zeros(4, device="cuda") + x.cuda()
        z = y.to("cuda") + x.to(torch.device("cuda", 0), torch.float32) + x.to("cuda", non_blocking=True, copy=True)
        z = self.linear(z + torch.tensor([1.0, 2.0, 3.0, 4.0], device=y.device))
        return z.to("cpu", torch.float64), str(z.device), float(x.to("cuda").sum())
