"""The duration of one kernel from its shape and the device. Knows no collective and no schedule."""
