"""Folders of tensors as `torch.distributed.checkpoint` (DCP) writes them, and our index to one: read without torch, and
without executing anything."""
