"""Causal language models of Hugging Face transformers as the engine of a node.

The device tier's planes are the model's KV memory: attention writes and reads the blocks of each
request's block table. Importing this package needs neither torch nor transformers.
"""
