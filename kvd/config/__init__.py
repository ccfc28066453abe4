"""Configuration: what can be set (`model`), where values come from (`load`), its documents."""
