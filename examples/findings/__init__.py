"""The pictures of docs/learning.md: ``python -m examples.findings``."""
