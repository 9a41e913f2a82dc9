"""What does not hold yet, by habit; the tests expect these to fail, so that mending one is seen. To become empty."""

TODAY = {
    "BranchOnWrittenConstant": "capture does not end",
    "LayerDropByTorch": "refused: cannot capture LayerDropByTorch: its Python code bran",
    "ItemOfInput": "a raw AssertionError",
    "ToList": "a raw AssertionError",
    "Arithmetic": "refused: in-place 'aten.reciprocal_.default' in '' at base.py:",
    "InPlaceOnInput": "it is accepted",
    "AutocastOff": "refused: cannot capture 'wrap_with_autocast' in '' |   higher-",
    "LabelsWritten": "a raw IndexError",
    "CounterReadThenWritten": "silently wrong: loss",
    "BufferSliceWritten": "a raw RuntimeError",
    "QueueWithPointer": "refused: in-place 'aten.index_copy_.default' in '' at base.py:",
    "BatchNormTwice": "silently wrong on two ranks: buffer norm.running_mean",
    "OldSpectralNorm": "it is accepted",
    "BufferThatIsAView": "silently wrong: loss",
    "PlainTensorWritten": "silently wrong: loss",
    "RecurrentState": "a raw RuntimeError",
}
