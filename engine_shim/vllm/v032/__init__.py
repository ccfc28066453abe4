"""vLLM 0.32, model runner V1, as kvd knows it; reached through `engine_shim.vllm.adapter`."""
