"""PyTorch as a program sees it. In: what a program does with `cuda`. Out: commands on the stream."""
