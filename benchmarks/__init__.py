"""Seeded measurements: ``python -m benchmarks.NAME [--quick] [--check] [--out FILE]``.

docs/benchmarks.md has their results.
"""
