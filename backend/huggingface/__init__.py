"""Hugging Face folders (`config.json` and safetensors) read into the shards of any layout, and
written back. Runs no model."""
