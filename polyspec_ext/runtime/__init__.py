"""Batches on their way through a chain: `batch` is what a chain drives."""
