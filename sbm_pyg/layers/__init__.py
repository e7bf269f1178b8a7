"""Modules of attention over graphs: the layers, what they weigh edges with, and where tokens stand."""
