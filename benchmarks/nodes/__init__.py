"""Real nodes, for tests, benchmarks and examples."""
