"""A demo in a real vLLM: two servers, one after the other, share what is in kvd's pool."""
