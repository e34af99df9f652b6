"""A small transformer that really attends over the device planes: demos and end-to-end truth."""
