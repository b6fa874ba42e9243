"""Benchmarks, one file each; ``python -m polyspec_ext bench`` runs them (cli/bench)."""
