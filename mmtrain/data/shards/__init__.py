"""Tars with an index beside each: reading, checking, listing them."""
