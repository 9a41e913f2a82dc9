"""Stands for six where it is not installed."""
