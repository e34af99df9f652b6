"""A small transformer that attends over the device planes, for demos and as the truth in tests."""
