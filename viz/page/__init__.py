"""Timelines as one HTML file to zoom and search in. Loads nothing from elsewhere, and needs no server."""
