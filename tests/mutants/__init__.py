"""Known-bad versions of the code, to see that the tests catch them."""
