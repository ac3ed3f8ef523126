"""The tensors of the published models that ``benchmarks.pool`` places: names are not needed, sizes in bytes are.

Generated from each architecture's published hyperparameters, in the dtype of the published weights, in the order in
which a forward pass uses them. Nothing is downloaded.
"""

from dataclasses import dataclass

from dormouse.core.decisions.memory.freelist import aligned

PACKED_NBYTES = 64 << 10
"""Tensors up to this size are laid together in one segment, at most 1 % of a model or 1 MiB (ARCHITECTURE §4.4)."""


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    source: str
    tensors: list[int]
    kv_nbytes: int  # per token: keys and values of all layers
    share: float  # of requests: 30 % to 1-3B, 60 % to 4-13B, 10 % to 14-30B (Tangram §5.1), evenly inside a class

    @property
    def nbytes(self) -> int:
        return sum(self.tensors)

    def segments(self) -> list[int]:
        return segments_of(self.tensors)


def segments_of(tensors: list[int]) -> list[int]:
    """Sizes of a model's segments in first-use order, the pack of small tensors first."""
    limit = max(sum(tensors) // 100, 1 << 20)
    small = sorted((nbytes, index) for index, nbytes in enumerate(tensors) if nbytes <= PACKED_NBYTES)
    packed, pack = set[int](), 0
    for nbytes, index in small:
        if pack + aligned(nbytes) > limit:
            break
        packed.add(index)
        pack += aligned(nbytes)
    rest = [nbytes for index, nbytes in enumerate(tensors) if index not in packed]
    return [pack, *rest] if packed else rest


def opt(hidden: int, layers: int) -> tuple[list[int], int]:
    """OPT: learned positions (2048 + 2), biases everywhere, feed-forward of four times the width, tied output, fp16."""
    norm = [hidden, hidden]
    attention = [part for _ in range(4) for part in (hidden * hidden, hidden)]
    feed = [4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden]
    tensors = [50272 * hidden, 2050 * hidden, *[*norm, *attention, *norm, *feed] * layers, *norm]
    return [2 * count for count in tensors], 2 * 2 * hidden * layers


def llama(
    hidden: int, layers: int, inner: int, vocabulary: int, kv: int, tied: bool, bias: bool = False
) -> tuple[list[int], int]:
    """Llama and what shares its shape (Yi; Qwen2.5 with biases on q, k and v); ``kv``: width of keys, bf16."""
    qkv = [hidden * hidden, hidden, hidden * kv, kv, hidden * kv, kv] if bias else [hidden * hidden, *[hidden * kv] * 2]
    layer = [hidden, *qkv, hidden * hidden, hidden, *[hidden * inner] * 3]
    tensors = [vocabulary * hidden, *layer * layers, hidden, *([] if tied else [vocabulary * hidden])]
    return [2 * count for count in tensors], 2 * 2 * kv * layers


def neox(hidden: int, layers: int, vocabulary: int) -> tuple[list[int], int]:
    """GPT-NeoX: one matrix for q, k and v, parallel residual with two norms, untied output, fp16."""
    attention = [3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden]
    feed = [4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden]
    layer = [hidden, hidden, *attention, hidden, hidden, *feed]
    tensors = [vocabulary * hidden, *layer * layers, hidden, hidden, vocabulary * hidden]
    return [2 * count for count in tensors], 2 * 2 * hidden * layers


def _model(name: str, source: str, share: float, shape: tuple[list[int], int]) -> Model:
    return Model(name=name, source=source, share=share, tensors=shape[0], kv_nbytes=shape[1])


def language_models() -> list[Model]:
    """The eight of Tangram's Table 1."""
    paper = "Zhang et al. 2022 (arXiv 2205.01068), Table 1; config.json of facebook/"
    return [
        _model("opt1.3B", paper + "opt-1.3b", 0.1, opt(2048, 24)),
        _model("qwen3B", "config.json of Qwen/Qwen2.5-3B", 0.1, llama(2048, 36, 11008, 151936, 256, True, True)),
        _model("llama3B", "config.json of meta-llama/Llama-3.2-3B", 0.1, llama(3072, 28, 8192, 128256, 1024, True)),
        _model("opt6.7B", paper + "opt-6.7b", 0.15, opt(4096, 32)),
        _model("llama8B", "config.json of meta-llama/Llama-3.1-8B", 0.15, llama(4096, 32, 14336, 128256, 1024, False)),
        _model("yi9B", "config.json of 01-ai/Yi-9B", 0.15, llama(4096, 48, 11008, 64000, 512, False)),
        _model("opt13B", paper + "opt-13b", 0.15, opt(5120, 40)),
        _model("gpt20B", "Black et al. 2022 (arXiv 2204.06745), Table 1", 0.1, neox(6144, 44, 50432)),
    ]


def resnet(depths: list[int]) -> list[int]:
    """Bottleneck ResNet (He et al. 2016, Table 1), float32: convolutions and four vectors per batch norm."""
    tensors = [64 * 3 * 49, *[64] * 4]
    width, wide = 64, 64
    for depth in depths:
        for block in range(depth):
            for count, out in ((wide * width, width), (width * width * 9, width), (width * 4 * width, 4 * width)):
                tensors += [count, *[out] * 4]
            if not block:
                tensors += [wide * 4 * width, *[4 * width] * 4]
            wide = 4 * width
        width *= 2
    return [4 * count for count in [*tensors, 2048 * 1000, 1000]]


def densenet(depths: list[int]) -> list[int]:
    """DenseNet of growth 32 (Huang et al. 2017, Table 1), float32."""
    tensors, wide = [64 * 3 * 49, *[64] * 4], 64
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            tensors += [*[wide] * 4, wide * 128, *[128] * 4, 128 * 32 * 9]
            wide += 32
        if stage + 1 < len(depths):
            tensors += [*[wide] * 4, wide * wide // 2]
            wide //= 2
    return [4 * count for count in [*tensors, *[wide] * 4, wide * 1000, 1000]]


def bert(hidden: int, layers: int) -> list[int]:
    """BERT (Devlin et al. 2019) with a question-answering head, float32."""
    attention = [part for _ in range(4) for part in (hidden * hidden, hidden)]
    feed = [4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden]
    layer = [*attention, hidden, hidden, *feed, hidden, hidden]
    tensors = [30522 * hidden, 512 * hidden, 2 * hidden, hidden, hidden, *layer * layers, 2 * hidden, 2]
    return [4 * count for count in tensors]


def torpor_models() -> list[tuple[str, list[int], float]]:
    """``(name, tensors, run time in seconds)`` of six of the eight models of Torpor's Table 4 (its column "GPU
    remoting", V100); Inception-v3 and EfficientNet, which have no simple rule, are left out.
    """
    return [
        ("DenseNet-169", densenet([6, 12, 32, 32]), 0.025),
        ("DenseNet-201", densenet([6, 12, 48, 32]), 0.028),
        ("ResNet-50", resnet([3, 4, 6, 3]), 0.009),
        ("ResNet-101", resnet([3, 4, 23, 3]), 0.014),
        ("ResNet-152", resnet([3, 8, 36, 3]), 0.017),
        ("Bert-qa", bert(1024, 24), 0.043),
    ]
