"""Pretrained models in, routed models out: import, graft and export, parameter by parameter."""
