"""Who keeps the node's memory alive beside the daemon, and gives it to the daemon's next life."""
