"""Byte accounting, written once: blocks, rings of layer buffers, hot buffers, regions.

Pure arithmetic over descriptions of `kvd.wire.layout`; used by kvd, by engine_shim and by every
table that says what will fit.
"""
