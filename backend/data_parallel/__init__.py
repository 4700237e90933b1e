"""How a stage's gradients are reduced and its weights updated: replicated, ZeRO, torch's FSDP. Knows no layer."""
