"""The training edge: a reference model, real text, an optimizer, and the loop around them.

Layer: `train`, above every other package. Nothing below imports it, and a user who brings an own
model, data and optimizer needs nothing from here.
"""
