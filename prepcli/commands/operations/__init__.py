"""The public operations: typed arguments in, a typed result out.

Notes, warnings and progress go to an observer.
"""
