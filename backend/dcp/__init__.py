"""Folders of tensors as `torch.distributed.checkpoint` (DCP) writes them, and our index to one. Read without torch;
nothing in them is executed."""
