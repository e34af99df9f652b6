"""A small transformer that attends over the device planes: for demos, and a reference in tests."""
