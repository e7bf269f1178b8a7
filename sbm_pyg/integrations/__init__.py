"""Callbacks for training loops of other libraries, which are imported by the module of that library only."""
