"""The allow-list: what is on it, what never may be."""

import pytest
import torch

from dormouse.gpuserver import operand_checks
from dormouse.gpuserver.oplist import allowed


@pytest.mark.parametrize(
    "name",
    [
        "aten::add.Tensor",
        "aten::linear",
        "aten::scaled_dot_product_attention",
        "aten::conv2d",
        "aten::index.Tensor",
        "aten::embedding",
        "aten::_softmax",
        "aten::_fft_c2c",
        "aten::arange.start_step",
        "aten::normal_",
        "aten::native_layer_norm",
        "aten::lstm.input",
        "aten::_native_multi_head_attention",
        "aten::as_strided",
        "aten::copy_",
        "aten::_to_copy",
        "aten::cat",
        "aten::topk",
    ],
)
def test_ordinary_operations_may_run(name: str) -> None:
    assert name in allowed()


@pytest.mark.parametrize(
    "word",
    [
        "backward",
        "sparse",
        "csr",
        "quantize",
        "nested",
        "from_file",
        "record_stream",
        "pin_memory",
        "segment_reduce",
        "unsafe_index",
    ],
)
def test_families_that_may_not(word: str) -> None:
    assert [name for name in allowed() if word in name] == []


def test_only_plain_operations_of_pytorch_itself() -> None:
    assert len(allowed()) > 1500
    for name, operation in allowed().items():
        assert name.startswith("aten::")
        assert callable(operation.call)
    assert not {"aten::set_.source_Storage", "aten::_stack.out", "aten::_foreach_copy.out", "aten::to_sparse"} & set(
        allowed()
    )


def test_checks_are_for_operations_that_may_run() -> None:
    bases = {operation.base for operation in allowed().values()}
    optional = {
        "cudnn_batch_norm",
        "_native_batch_norm_legit_functional",
        "_batch_norm_no_update",
        "_batch_norm_with_update_functional",
    }
    assert set(operand_checks.CHECKS) - bases <= optional


def test_transforms_check_their_dimensions() -> None:
    x = torch.zeros(3, 4)
    check = operand_checks.CHECKS["_fft_r2c"]
    assert check([x, [1], 0, True], {}) is None
    for dims in ([2], [-1], [0, 0], [], [1 << 40]):
        assert check([x, dims, 0, True], {}) is not None
    real = operand_checks.CHECKS["_fft_c2r"]
    assert real([x.to(torch.complex64), [1], 0, 6], {}) is None
    assert real([x.to(torch.complex64), [1], 0, 60], {}) is not None
