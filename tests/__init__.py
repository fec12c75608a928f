"""Tests of koila; `python -m tests.<module>` runs the reports."""
