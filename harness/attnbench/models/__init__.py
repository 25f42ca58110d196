"""Attention inside real models of the package transformers: checked layer by layer, and timed as a whole step."""
