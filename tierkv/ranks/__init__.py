"""Several tensor-parallel ranks as one device: in this process, or in worker processes."""
