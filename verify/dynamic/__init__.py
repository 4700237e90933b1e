"""The dynamic proof: `prove` asks for static, symbolic and dynamic proof in turn. The only way to the third."""

from .proof import Proof, prove

__all__ = ["Proof", "prove"]
