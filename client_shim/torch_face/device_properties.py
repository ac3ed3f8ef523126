"""The result of `torch.cuda.get_device_properties`: the node's report of the GPU, and values that its capability
decides.

The rest differs between GPUs of one capability, and is not known here: it is refused by name.
"""

from typing import Final, NoReturn

from dormouse.schemas.messages import DeviceInfo

_PER_MULTIPROCESSOR: Final = {  # threads, KiB of shared memory
    (7, 0): (2048, 96),
    (7, 5): (1024, 64),
    (8, 0): (2048, 164),
    (8, 6): (1536, 100),
    (8, 7): (1536, 164),
    (8, 9): (1536, 100),
    (9, 0): (2048, 228),
    (10, 0): (2048, 228),
    (12, 0): (1536, 100),
}
"""By compute capability, from NVIDIA's CUDA programming guide."""


class DeviceProperties:
    def __init__(self, device: DeviceInfo) -> None:
        self.name = device.name
        self.major, self.minor = device.capability
        self.total_memory = device.total_nbytes
        self.multi_processor_count = device.multiprocessors
        self.is_integrated = self.is_multi_gpu_board = 0
        self.regs_per_multiprocessor = 65536
        self.max_threads_per_block = 1024
        self.shared_memory_per_block = 49152
        self.warp_size = 32
        self.gcnArchName = ""
        if (known := _PER_MULTIPROCESSOR.get((self.major, self.minor))) is not None:
            self.max_threads_per_multi_processor = known[0]
            self.shared_memory_per_multiprocessor = known[1] << 10

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name} of a GPU is not known in a Dormouse function, whose GPU may be another in the next request"
        )

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count})"
        )
