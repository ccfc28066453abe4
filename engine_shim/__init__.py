"""engine_shim: the side of kvd that lives inside an LLM engine.

It holds the device-side buffers and asks kvd when memory may be used; it never decides by itself
that memory is free. Importing this package loads neither torch nor an engine: what needs them is
imported by name (`engine_shim.reference`, the device modules).
"""
