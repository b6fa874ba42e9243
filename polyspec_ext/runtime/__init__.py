"""Execution of batches: a chain uses `batch`."""
