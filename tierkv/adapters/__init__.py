"""Inference engines over tierkv, one file each. None is imported unless it is asked for."""
