"""Benchmarks, one file each with its options; ``python -m polyspec_ext bench`` runs them."""
