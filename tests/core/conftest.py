"""Hypothesis without deadlines: the machines that run these tests are shared, so the time of one example means nothing."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
