"""The shell round the core: sockets, memory, threads and time. asyncio lives here only."""
