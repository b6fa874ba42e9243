"""Benchmarks, one file each with its options; ``python -m benchmarks`` runs them."""
