"""Decoders of quantised tensors to floats, one module per format. They read and decode parts of a tensor."""
