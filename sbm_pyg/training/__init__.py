"""What trains a graph source: estimators of the gradient, auxiliary losses, and the way from dense to sparse."""
