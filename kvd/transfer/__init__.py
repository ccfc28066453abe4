"""Transfer engines: how a read's rows get from a producer's memory into a consumer's."""
