"""A GPU by CUDA's driver."""
