"""The main job on one machine: two kvds, a prefill engine, a decode engine, one long text."""
