"""torchvision on cuda:0 of a loopback node, in a process of its own: `python tests/vision_suite.py DIRECTORY CHECK...`.

DIRECTORY has torchvision, whose wheel is built for CUDA; what that wants of CUDA's libraries are stubs of its names,
compiled here. Prints nothing and returns 0, or fails as Python does.
"""

import ctypes
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DIRECTORY = Path(sys.argv[1])
STUBS = ("libc10_cuda.so", "libtorch_cuda.so", "libcudart.so.13")


def symbols(library: Path, kind: str) -> set[str]:
    text = subprocess.run(["nm", "-D", kind, library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in text.splitlines()}


def load_stubs() -> None:
    """Every name that torchvision's library wants and PyTorch's own do not have; nobody calls one."""
    wanted = symbols(DIRECTORY / "torchvision" / "_C.so", "--undefined-only")
    names = {name.partition("@")[0] for name in wanted if "cuda" in name.lower()}
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "stub.c"
        source.write_text("".join(f"void* {name}(void) {{ return 0; }}\n" for name in sorted(names)))
        versions = Path(made) / "versions"
        versions.write_text("libcudart.so.13 { global: *; };")
        for stub in STUBS:
            script = [f"-Wl,--version-script={versions}"] if "cudart" in stub else []
            command = [
                "gcc",
                "-shared",
                "-w",
                f"-Wl,-soname,{stub}",
                *script,
                "-o",
                f"{made}/{stub}",
                str(source),
            ]
            subprocess.run(command, check=True)
            ctypes.CDLL(f"{made}/{stub}", mode=ctypes.RTLD_GLOBAL)


def detectors() -> dict[str, Callable[[], Any]]:
    from torchvision.models import detection

    options: dict[str, Any] = {
        "weights": None,
        "weights_backbone": None,
        "num_classes": 4,
        "min_size": 64,
        "max_size": 96,
    }
    return {
        "fasterrcnn": lambda: detection.fasterrcnn_mobilenet_v3_large_320_fpn(**options, box_score_thresh=0.0),
        "maskrcnn": lambda: detection.maskrcnn_resnet50_fpn(**options, box_score_thresh=0.0, box_detections_per_img=8),
        "retinanet": lambda: detection.retinanet_resnet50_fpn(**options, score_thresh=0.0, topk_candidates=50),
        "ssd": lambda: detection.ssdlite320_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=4, score_thresh=0.0
        ),
    }


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in (value.values() if isinstance(value, dict) else value) for tensor in tensors(item)]


def detector(name: str, loopback: Any) -> None:
    torch.manual_seed(0)
    model, images = detectors()[name]().eval(), [torch.rand(3, 64, 80), torch.rand(3, 48, 64)]
    expected = tensors(model(images))
    assert sum(value.numel() for value in expected) > 0, "there is something to compare"
    model.to("cuda")
    loopback.end_lease()
    loopback.begin_lease()
    outputs = model([image.to("cuda") for image in images])
    found = tensors(outputs)
    assert {value.device for value in found} == {torch.device("cuda", 0)}
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-3, atol=1e-4)


def operators(loopback: Any) -> None:
    """Each that is built in, as native; and what a hostile function might hand them is refused."""
    from torchvision import ops

    torch.manual_seed(0)
    boxes = torch.rand(20, 2).repeat(1, 2) + torch.tensor([0.0, 0.0, 0.4, 0.4])
    image = torch.rand(2, 8, 12, 12)
    rois = torch.cat([torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0, 1, 8, 9], [0, 2, 11, 7]])], 1)
    offset, weight = torch.rand(2, 2 * 9, 10, 10), torch.rand(4, 8, 3, 3)
    calls: list[tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = [
        (ops.nms, (boxes, torch.rand(20), 0.5)),
        (ops.batched_nms, (boxes, torch.rand(20), torch.arange(20) % 2, 0.5)),
        (ops.roi_align, (image, rois, (2, 2))),
        (ops.roi_pool, (image, rois, (2, 2))),
        (ops.ps_roi_align, (image, rois, 2)),
        (ops.ps_roi_pool, (image, rois, 2)),
        (ops.deform_conv2d, (image, offset, weight)),
    ]
    loopback.begin_lease()
    for call, args in calls:
        there = call(*(arg.to("cuda") if isinstance(arg, torch.Tensor) else arg for arg in args))
        assert there.is_cuda
        torch.testing.assert_close(there.cpu(), call(*args), msg=call.__name__)

    raw: Any = torch.ops.torchvision
    cuda: Any = torch.cuda
    x, r, o, w = (value.to("cuda") for value in (image, rois, offset, weight))
    far, huge, none = r + torch.tensor([5.0, 0, 0, 0, 0]).to("cuda"), r * 1e30, r * float("nan")
    plain = (1, 1, 0, 0, 1, 1, 1, 1)  # strides, padding, dilation, groups
    mask, bias = torch.ones(2, 9, 10, 10, device="cuda"), torch.zeros(4, device="cuda")
    attacks: tuple[Any, ...] = (
        *(lambda bad=bad: raw.roi_align(x, bad, 1.0, 2, 2, -1, False) for bad in (far, -far, huge, none, r[:, :4])),
        *(lambda bad=bad: raw.roi_pool(x, bad, 1.0, 2, 2) for bad in (far, huge)),
        *(lambda bad=bad: raw.ps_roi_align(x, bad, 1.0, 2, 2, -1) for bad in (far, huge)),
        lambda: raw.ps_roi_pool(x, r, 1.0, 0, 0),
        lambda: raw.ps_roi_pool(x, far, 1.0, 2, 2),
        lambda: raw.roi_align(x, r, 1.0, 2, 2, 1 << 30, False),
        lambda: raw.roi_align(x, r, 1e30, 2, 2, -1, False),
        *(
            lambda at=at, bad=bad: raw.deform_conv2d(x, w, o, mask, bias, *plain[:at], bad, *plain[at + 1 :], True)
            for at, bad in ((0, 0), (3, -1), (5, 0), (6, 0), (6, 3), (7, 0), (7, 5), (7, 1 << 31))
        ),
        lambda: raw.deform_conv2d(x, w, o, mask, bias[:1], 1, 1, 0, 0, 1, 1, 1, 1, True),
        lambda: raw._roi_align_backward(x, r, 1.0, 2, 2, 2, 8, 12, 12, 2, False),
    )
    for hostile in attacks:
        found = "nothing"
        try:
            hostile()
            cuda.synchronize()
        except (RuntimeError, NotImplementedError) as error:
            found = str(error)
        if "on cuda:0" not in found:  # as the executor's errors say
            raise AssertionError(f"{found} of {hostile.__code__.co_names} {hostile.__defaults__}")
    assert (x + 1).sum().item() == (image + 1).sum().item()


def main() -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(DIRECTORY))
    load_stubs()
    import loopback
    import torchvision  # noqa: F401 - now, as an instance would have it from its zygote

    torch.set_grad_enabled(False)
    world: Any = loopback.LoopbackWorld()
    try:
        for check in sys.argv[2:]:
            if check == "operators":
                operators(world)
            else:
                detector(check, world)
            world.end_lease()
    finally:
        world.close()


if __name__ == "__main__":
    main()
