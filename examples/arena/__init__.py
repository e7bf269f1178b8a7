"""The arena: graph sources by name, and one's own, on generated tasks at equal densities. ``python -m examples.arena --help``."""
