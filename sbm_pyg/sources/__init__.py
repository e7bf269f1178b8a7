"""Graph sources: each chooses the graph that attention runs over, from the queries and keys of a batch."""
