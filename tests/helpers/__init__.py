"""What tests of several folders share and ranks can load by name; `pythonpath` in pyproject.toml makes it
importable as `helpers`."""
