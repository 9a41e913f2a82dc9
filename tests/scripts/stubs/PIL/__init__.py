"""Stands for Pillow where it is not installed."""
