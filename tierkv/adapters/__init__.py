"""Adapters of inference engines to tierkv, one file each, imported only where they are used."""
