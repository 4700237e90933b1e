"""A timeline as a picture without pixels: rows, boxes, axes, colours. Computes no seconds and no bytes."""
