"""`kvrelay bench ladder`: the same work with one technique after the other, naive to all of them."""
