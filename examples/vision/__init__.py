"""Photographs and a small real encoder for them, without torch: what shared_vision.py and cluster.py look at.

May import onnxruntime, scikit-image's files and numpy, and nothing of tensord. Owns the reading of the checkpoint.
"""
