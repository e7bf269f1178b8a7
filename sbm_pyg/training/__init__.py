"""Training of graph sources: gradient estimators, auxiliary losses, and the schedule from dense to sparse."""
