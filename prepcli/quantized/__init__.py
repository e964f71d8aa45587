"""Decoders and encoders of quantised tensors, one module per format. They read and decode parts of a tensor."""
