"""The function's side: PyTorch without a GPU, whose operations run on the node's."""
