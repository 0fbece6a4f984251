"""Choices users may plug in: one file each, the file name is the name in the config (core/plugins).

Each module has `build(**params)` and makes one object of its kind's protocol (core/policy).
Policies are arithmetic on what they are given: no I/O, no clock, no loop over ranks. Every file
found here is run through tests/conformance; a module of another package is named by dotted path or
entry point.
"""
