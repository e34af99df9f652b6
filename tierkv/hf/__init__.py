"""Causal language models of Hugging Face transformers as the engine of a node.

The model has no KV cache of its own. Its attention writes and reads the planes of the device tier
(for each layer one array of keys and one of values, divided into blocks), through the block table
of each request. Importing this package needs neither torch nor transformers.
"""
