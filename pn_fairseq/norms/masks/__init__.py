"""Padding masks: their forms, the layouts of activations, and which mask a norm uses."""
