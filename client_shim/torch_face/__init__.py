"""PyTorch as a program sees it. In: a program's uses of `cuda`. Out: commands on the stream."""
