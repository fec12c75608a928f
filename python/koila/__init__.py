"""Lazy PyTorch programs, run in batch chunks with the unsplit numbers."""
