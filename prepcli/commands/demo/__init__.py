"""The steps of `prep demo`."""
