"""Carry out a `Plan`: staging, shared work, resume, integrity checks, publication and uploads."""
