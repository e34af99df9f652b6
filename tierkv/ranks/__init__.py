"""Several ranks as one device: in this process, or in workers behind a Unix socket."""
